"""Fixtures that test files of several packages share; a file's own of the same name goes before."""

import pytest


@pytest.fixture(scope="module")
def model(request):
    """A model of random weights, of the file's CONFIG."""
    from tests.models import reference  # not for tests of the packages below

    return reference.decoder(request.module.CONFIG)


@pytest.fixture(scope="session")
def tokenizer():
    """The tokenizer that the embedded model's recipe trains."""
    from train import data

    return data.train_tokenizer()
