"""What strangers wrote runs in a process of its own, which ends where it takes too much; the next call has another."""

import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from models import chat_templates
from models.limited import Limited
from models.limited import __file__ as limited_file

DOUBLED = "{% set n = namespace(x='x') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def limited(request):
    seconds = getattr(request, "param", 60)
    limited = Limited(chat_templates.__file__, "render", seconds=seconds, gib=1)
    yield limited
    limited.close()


@pytest.fixture
def render(limited):
    return lambda template, **values: limited(template=template, values=values)


@pytest.mark.parametrize(
    "template",
    [
        *("{{ 'x'.center(10 ** 10) }}", "{{ '%04000000000d' % 1 }}", "{{ 'x' | center(10 ** 10) }}", DOUBLED),
        "{{ ('x' * 1610612736) | length }}",
        *("{{ ('x' * 10 ** 5).replace('x', 'y' * 10 ** 5) }}", "{{ '{:>10000000000}'.format(1) }}"),
    ],
)
def test_memory_is_bounded_however_it_is_asked_for(render, template):
    with pytest.raises(ValueError, match="it took more than 1 GiB of memory"):
        render(template)
    assert render("{{ x }}", x="as before") == "as before"


@pytest.mark.parametrize("limited", [1], indirect=True)
@pytest.mark.parametrize("template", [LOOPS, "{{ 9 ** (9 ** 9) }}"])  # the second is one operation
def test_time_is_bounded_and_the_next_call_has_a_new_process(render, template):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(ValueError, match="it took more than 1 s of processor time"):
        render(template)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert 0.5 < after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3
    assert render("{{ x }}", x="as before") == "as before"


IGNORES = """
import runpy, signal, sys
signal.signal(signal.SIGPROF, signal.SIG_IGN)
limited = runpy.run_path(sys.argv[1])["Limited"](sys.argv[2], "render", seconds=1, gib=1)
try:
    limited(template=sys.argv[3], values={})
except ValueError as error:
    print(error)
"""


def test_time_is_bounded_where_whoever_starts_the_process_ignores_the_signal():
    """As a process does that has loaded libtpu, and a process that it starts inherits it."""
    # In a process of its own: where libtpu has a timer, a signal that is no longer ignored ends this one.
    command = [sys.executable, "-c", IGNORES, limited_file, chat_templates.__file__, LOOPS]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout == "it took more than 1 s of processor time\n"


def test_values_cross_as_they_are_and_an_error_as_its_sentence(render):
    values = {"text": "é\n\u2028\ud800 'quoted'", "turns": [{"role": "user", "n": 1.5}], "none": None}
    assert json.loads(render("{{ values | tojson }}", values=values)) == values
    with pytest.raises(ValueError, match=r"^no system role$"):
        render("{{ raise_exception('no  system\nrole') }}")


def test_a_call_after_an_interrupted_one_gets_its_own_answer(tmp_path):
    (tmp_path / "slow.py").write_text("import time\ndef late(x, wait):\n    time.sleep(wait)\n    return x\n")
    late = Limited(tmp_path / "slow.py", "late", seconds=1, gib=1)
    assert late(x=0, wait=0) == 0

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            late(x=1, wait=60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    begun = time.monotonic()
    assert late(x=2, wait=0) == 2 and time.monotonic() - begun < 30
    late.close()


def test_a_process_that_died_says_how(tmp_path):
    (tmp_path / "gone.py").write_text("import os\ndef gone(status):\n    os._exit(status)\n")
    gone = Limited(tmp_path / "gone.py", "gone", seconds=1, gib=1)
    with pytest.raises(ValueError, match="its process ended with status 7"):
        gone(status=7)
    gone.close()


def test_a_file_that_cannot_be_imported_is_named(tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    with pytest.raises(RuntimeError, match=r"broken\.py did not start"):
        Limited(tmp_path / "broken.py", "f", seconds=1, gib=1)()


def test_nothing_of_the_process_is_left_behind(tmp_path):
    (tmp_path / "who.py").write_text("import os\ndef who():\n    print('no reply')\n    return os.getpid()\n")
    who = Limited(tmp_path / "who.py", "who", seconds=1, gib=1)
    pid = who()
    assert pid != os.getpid() and who() == pid
    who.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
