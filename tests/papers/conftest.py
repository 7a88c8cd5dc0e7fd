"""Give what the evaluations' tests have: a tiny model in a folder, a text, and a command's output."""

import pytest

from papers.__main__ import main
from tests.evals import conftest
from tests.evals.conftest import retriever, text_file, tiny, tiny_folder

__all__ = ["retriever", "run_eval", "text_file", "tiny", "tiny_folder"]


@pytest.fixture
def run_eval(tmp_path, capsys):
    """Runs an experiment, and gives what its JSON has and what it printed; there is a picture, too."""
    return conftest.runner(main, tmp_path, capsys)
