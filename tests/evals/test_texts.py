"""Texts by their names, and their sections."""

from evals import texts


def test_sections_are_cut_at_their_titles():
    assert texts.sections("Before.\n\n== A ==\n\nOne\ntwo.\n\n\nThree.\n\n== B ==\n\n== C ==\n\n# == D ==\n") == {
        "": ["Before."],
        "A": ["One two.", "Three."],
        "C": ["# == D =="],
    }
