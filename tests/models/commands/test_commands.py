"""What command lines share."""

import itertools
import json
import os
import re
import subprocess
import sys
import threading
import warnings

import jax
import pytest

import kvjax
from models import commands, files
from models.commands import generate


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("full,h2o", ["full", "h2o"]),
        ("h2o+protect(sinks=4), tova", ["h2o+protect(sinks=4)", "tova"]),
        (" , ", []),
    ],
)
def test_lists_split_at_commas_outside_parentheses(text, parts):
    assert commands.split_list(text) == parts


WRONG = {
    "ask": "smollm2 --document book.txt --nonsense",
    "batch": "prompts.jsonl --out answers.jsonl --nonsense",
    "calibrate": "smollm2 --text book.txt --nonsense",
    "chat": "smollm2 --nonsense",
    "generate": "smollm2 --nonsense",
    "get": "smollm2 --nonsense",
}
READ = """import importlib, sys
for line in sys.argv[1:]:
    name, *words = line.split()
    try:
        importlib.import_module("models.commands." + name).main(words)
    except SystemExit as error:
        print(error.code, "jax" in sys.modules, file=sys.stderr)
"""


def test_flags_are_read_before_jax_is_imported():
    lines = [line for name, words in WRONG.items() for line in (name, f"{name} {words}", f"{name} --help")]
    done = subprocess.run([sys.executable, "-c", READ, *lines], capture_output=True, text=True, check=True)
    for name, said in zip(WRONG, itertools.batched(done.stderr.splitlines(), 5), strict=True):
        missing, first, unknown, *codes = said
        assert [first, *codes] == ["2 False", "2 False", "0 False"] and "required" in missing
        called = f"python -m models.{name}"
        assert unknown == f"{called}: error: unrecognized arguments: --nonsense; see {called} --help."


@pytest.mark.parametrize(("text", "budget"), [("0.25", 0.25), ("25%", 0.25), ("512", 512)])
def test_a_reading_budget_is_written_as_a_budget(text, budget, capsys):
    assert generate.parser().parse_args(["retriever", "--reading-budget", text]).reading_budget == budget
    with pytest.raises(SystemExit):
        generate.parser().parse_args(["retriever", "--reading-budget", "lots"])
    assert "--reading-budget: the budget is 'lots'" in capsys.readouterr().err


def test_a_file_is_replaced_as_a_whole_or_not_at_all_and_keeps_its_permissions(tmp_path):
    target = tmp_path / ("x" * 250 + ".json")  # a long name
    files.write_json(target, 0)
    target.chmod(0o640)
    files.write_json(target, {"good": 1})
    with pytest.raises(RuntimeError), files.replacing(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(target, {"bad": float("nan")})
    assert json.loads(target.read_text()) == {"good": 1} and target.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [target]


def test_a_link_stays_a_link_and_its_file_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    target, link, chain = tmp_path / "there" / "figures.json", tmp_path / "link.json", tmp_path / "chain.json"
    link.symlink_to("there/figures.json")  # to nothing yet
    chain.symlink_to(link)
    for number, path in enumerate([link, chain]):
        files.check_outputs([path])
        files.write_json(path, number)
        assert link.is_symlink() and chain.is_symlink() and json.loads(target.read_text()) == number
    assert [path.name for path in target.parent.iterdir()] == ["figures.json"]


def test_a_pipe_gets_the_whole_content_or_nothing_and_stays(tmp_path):
    pipe, read = tmp_path / "figures.json", []
    os.mkfifo(pipe)
    files.check_outputs([pipe])
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    files.write_json(pipe, {"good": 1})
    reader.join()
    assert json.loads(read[0]) == {"good": 1}
    with pytest.raises(RuntimeError), files.replacing(pipe) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe] and not temporary.exists()


def test_a_terminal_is_written_into():
    # Never a device such as /dev/null: where this test fails as root, the machine's own would be gone.
    main, terminal = os.openpty()
    files.write_json(os.ttyname(terminal), {"figure": 1})
    assert os.read(main, 100).split() == [b"{", b'"figure":', b"1", b"}"]


def test_figures_stand_between_what_is_printed(capfd):
    print("a")
    files.write_json("/dev/fd/1", 1)
    print("b")
    assert capfd.readouterr().out == "a\n1\nb\n"


def test_a_stream_that_is_not_open_is_refused_early():
    with pytest.raises(OSError, match="permission denied"):
        files.check_outputs(["/dev/fd/987"])


def test_bad_input_ends_in_one_sentence_and_code_2_but_a_defect_of_ours_is_not_hidden(capsys):
    def command(error):
        raise error

    assert commands.run(lambda: command(ValueError("the budget is 0.")), "evals needle") == 2
    assert capsys.readouterr().err == "evals needle: error: the budget is 0.\n"
    for defect in (AssertionError("a bug"), jax.errors.JaxRuntimeError("INTERNAL: a bug")):
        with pytest.raises(type(defect), match="a bug"):
            commands.run(lambda defect=defect: command(defect), "evals needle")


def test_a_warning_is_one_line_of_a_command_s(capsys):
    assert commands.run(lambda: warnings.warn("two files lie there.", stacklevel=1), "evals needle") == 0
    assert capsys.readouterr().err == "[warning: two files lie there.]\n"


def test_all_missing_extras_of_a_command_are_named_at_once(tmp_path, capsys, monkeypatch):
    for name in ("matplotlib", "gguf"):
        monkeypatch.setitem(sys.modules, name, None)
    flags = commands.parser("x", "x", description="x")
    flags.add_argument("--model")
    flags.add_argument("--plot")
    line = ["--compilation-cache", "off", "--model", "M.GGUF"]
    said = "x: error: matplotlib and gguf are not installed; install them with: pip install -e '.[plot,gguf]'."
    assert commands.call(flags, lambda given: pytest.fail("begun"), "x", [*line, "--plot", "a.png"]) == 2
    assert capsys.readouterr().err == f"{said}\n"
    assert commands.call(flags, lambda given: None, "x", line[:2]) == 0
    monkeypatch.setattr(sys, "argv", ["x", *line])
    with pytest.raises(SystemExit, match="2"), commands.extra("train", "x"):
        import no_such_module  # noqa: F401
    assert (
        "no_such_module and gguf are not installed; install them with: pip install -e '.[train,gguf]'."
        in capsys.readouterr().err
    )


@pytest.fixture
def programs_as_before():
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_in_the_users_cache_or_where_a_variable_or_the_flag_says(tmp_path, programs_as_before):
    usual, variable, flag = tmp_path / "kvjax" / "programs", tmp_path / "variable", str(tmp_path / "flag")
    assert commands.keep_compiled(None, {"XDG_CACHE_HOME": str(tmp_path)}) == usual
    assert jax.config.jax_compilation_cache_dir == str(usual) and usual.is_dir()
    own = {"KVJAX_COMPILATION_CACHE": str(variable)}
    assert str(commands.keep_compiled(flag, own)) == flag and not variable.exists()
    assert commands.keep_compiled(None, own) == variable


def test_no_program_is_kept_where_nothing_can_be_written_or_jax_was_told(tmp_path, programs_as_before):
    (tmp_path / "file").touch()
    before = jax.config.jax_compilation_cache_dir
    assert commands.keep_compiled(None, {"XDG_CACHE_HOME": str(tmp_path / "file")}) is None
    told = {"XDG_CACHE_HOME": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": "there"}
    assert commands.keep_compiled(None, told) is None
    assert commands.keep_compiled("off", {"XDG_CACHE_HOME": str(tmp_path)}) is None
    assert jax.config.jax_compilation_cache_dir == before and not (tmp_path / "kvjax").exists()


@pytest.fixture
def my_module(tmp_path, monkeypatch):
    """A module in the working directory that registers a policy, as a script's Python does not find it by itself."""
    (tmp_path / "mine_here.py").write_text(
        "import kvjax\n@kvjax.register\ndef mine():\n"
        "    return kvjax.base_score('mine', lambda o: o.position[:, :, None].astype('float32'))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    yield "mine_here"
    sys.modules.pop("mine_here", None)


def test_import_makes_the_policies_of_a_module_known(my_module):
    flags = generate.parser().parse_args(["retriever", "--import", my_module, "--policy", "mine+caote"])
    assert str(kvjax.parse(flags.policy)) == "mine+caote"


def test_a_module_that_cannot_be_imported_is_named_on_one_line(my_module, tmp_path, capsys):
    (tmp_path / "broken_here.py").write_text("raise KeyError('x')")
    for name, why in (("nowhere", "No module named 'nowhere'"), (f"{my_module},broken_here", r"\(KeyError: 'x'\)")):
        with pytest.raises(SystemExit, match="2"):
            generate.main(["retriever", "--import", name])
        said = capsys.readouterr().err
        assert re.fullmatch(rf".*: error: --import: \w+ cannot be imported \(?.*{why}.*; see .* --help\.\n", said)


def test_without_a_subcommand_the_help_is_that_of_the_command():
    parser = commands.Parser(prog="tool")
    parser.add_subparsers(dest="name").add_parser("one")
    with pytest.raises(SystemExit):
        parser.parse_args(["--other"])
    assert parser.parse_args(["one"]).name == "one"
