"""What command lines share."""

import json

import pytest

from models import commands


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("full,h2o", ["full", "h2o"]),
        ("h2o+protect(sinks=4,recent=0.5), tova", ["h2o+protect(sinks=4,recent=0.5)", "tova"]),
        (" , ", []),
    ],
)
def test_lists_split_at_commas_outside_parentheses(text, parts):
    assert commands.split_list(text) == parts


@pytest.mark.parametrize(("text", "budget"), [("512", 512), ("0.25", 0.25), ("1.0", 1.0)])
def test_a_budget_is_slots_or_a_ratio(text, budget):
    assert commands.parse_budget(text) == budget
    assert type(commands.parse_budget(text)) is type(budget)


@pytest.mark.parametrize("text", ["1.5", "-0.1", "0.0", "many", "nan", ""])
def test_a_budget_that_is_neither_is_refused(text):
    with pytest.raises(ValueError, match="neither slots per head"):
        commands.parse_budget(text)


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    target = tmp_path / "figures.json"
    commands.write_json(target, {"good": 1})
    with pytest.raises(RuntimeError), commands.replacing(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert json.loads(target.read_text()) == {"good": 1}
    assert list(tmp_path.iterdir()) == [target]


def test_figures_that_json_cannot_hold_destroy_nothing(tmp_path):
    target = tmp_path / "figures.json"
    commands.write_json(target, {"good": 1})
    with pytest.raises(ValueError, match="JSON"):
        commands.write_json(target, {"bad": float("nan")})
    assert json.loads(target.read_text()) == {"good": 1}


def test_probing_an_output_leaves_it_as_it_was(tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("old")
    commands.check_outputs([old, new, None])
    assert old.read_text() == "old"
    assert not new.exists()


def test_an_output_in_a_folder_that_is_missing_is_refused_early(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the folder .* does not exist"):
        commands.check_outputs([tmp_path / "nowhere" / "out.json"])


def test_an_output_that_is_a_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="it is a folder; name a file"):
        commands.check_outputs([tmp_path])


def test_bad_input_ends_in_one_sentence_and_code_2(capsys):
    def command():
        raise ValueError("the budget is 0; at least 1 token must stay.")

    assert commands.run(command, "evals needle") == 2
    assert capsys.readouterr().err == "evals needle: error: the budget is 0; at least 1 token must stay.\n"


def test_an_interrupt_ends_in_code_130(capsys):
    def command():
        raise KeyboardInterrupt

    assert commands.run(command, "evals needle") == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_defect_of_ours_is_not_hidden():
    def command():
        raise AssertionError("a bug")

    with pytest.raises(AssertionError, match="a bug"):
        commands.run(command, "evals needle")
