"""Fixtures that test files of several packages share; a file's own of the same name goes before."""

import signal

import pytest


@pytest.fixture(scope="module")
def model(request):
    """A model of random weights, of the file's CONFIG."""
    from tests.models import reference  # not for tests of the packages below

    return reference.decoder(request.module.CONFIG)


@pytest.fixture(scope="session")
def tokenizer():
    """The tokenizer that the embedded model's recipe trains."""
    from papers.retriever import data

    return data.train_tokenizer()


@pytest.fixture
def ctrl_c():
    """Python's own way with Ctrl-C, which a run in the background ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
