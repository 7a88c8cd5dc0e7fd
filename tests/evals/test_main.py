"""The one command lists what is installed."""

import sys

import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.__main__ import main as benchmark
from evals.__main__ import main
from evals.evaluations import EVALUATIONS as REGISTRY
from evals.evaluations import NAMES
from models import commands
from models.commands import batch, calibrate, chat, generate, get
from papers.__main__ import EXPERIMENTS
from papers.__main__ import main as experiment
from train import butler, finetune, scorer

ALONE = (batch, calibrate, chat, generate, get, butler, finetune, scorer)


@pytest.mark.parametrize(
    ("command", "names"),
    [(main, NAMES), (benchmark, BENCHMARKS), (experiment, EXPERIMENTS), *((own.main, [None]) for own in ALONE)],
)
def test_every_command_imports_modules_of_your_own(command, names, capsys):
    for name in names:
        with pytest.raises(SystemExit, match="2"):
            command([*filter(None, [name]), "--import", "no_such_module"])
        assert "--import: no_such_module cannot be imported" in capsys.readouterr().err


def test_an_experiment_s_help_ends_with_its_examples_and_exit_codes(capsys):
    with pytest.raises(SystemExit, match="0"):
        experiment(["coref", "--help"])
    assert "examples:\n  python -m papers coref --select" in (said := capsys.readouterr().out) and "exit codes:" in said


def test_experiments_keep_compiled_programs_where_they_are_told(monkeypatch):
    kept = []
    monkeypatch.setattr(commands, "keep_compiled", kept.append)
    assert experiment(["--compilation-cache", "off", "coref", "--mode", "sing"]) == 2 and kept == ["off"]


@pytest.fixture(autouse=True)
def evaluations_that_a_test_registers_end_with_it():
    before = dict(REGISTRY), dict(REGISTRY.sources)
    yield
    REGISTRY.added, REGISTRY.sources = before


def test_a_module_s_evaluation_is_a_subcommand(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_evaluation.py").write_text(
        '"""It says hello."""\nimport sys\nfrom evals import evaluations\nEXAMPLES = "examples:"\n'
        "def add_flags(flags): flags.add_argument('--to', default='you')\n"
        "def command(flags): print('hello', flags.to)\n"
        "evaluations.register('hello', sys.modules[__name__])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["hello", "--import", "my_evaluation", "--to", "all"]) == 0
    assert capsys.readouterr().out == "hello all\n"
    assert main(["--import", "my_evaluation", "hello"]) == 0
    with pytest.raises(ValueError, match=r"'needle' is in evals\.needle and in my_evaluation"):
        REGISTRY.add("needle", sys.modules.pop("my_evaluation"), source="my_evaluation")


def test_a_package_s_evaluation_is_imported_when_it_is_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "pkg_task.py").write_text("raise RuntimeError('not now')")
    metadata = tmp_path / "pkg_task-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pkg-task\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[kvjax.evaluations]\ntask = pkg_task\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "From pkg-task 0.1." in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["task"])
    assert "'pkg_task' cannot be imported (RuntimeError: not now)" in capsys.readouterr().err
