"""Arrays computed of a model once, against their definition in NumPy float64."""

import numpy as np
import pytest

import models
from models.commands import calibrate
from models.config import Config
from tests.models import reference

CONFIG = Config(64, 16, 24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)


@pytest.mark.bad_input
@pytest.mark.parametrize("tokens", [[1, 2, 3], [[0.5, 1.0]], np.zeros((1, 0), int)], ids=str)
def test_texts_of_another_shape_are_refused(tokens):
    model = reference.decoder(CONFIG)
    with pytest.raises(ValueError, match=r"tokens are \w+ of shape .*; expected integers \[B, T\]"):
        models.q_filters(model, tokens)


def test_equal_queries_lie_at_their_centre_wherever_they_stand():
    model = reference.decoder(CONFIG)
    one, many = (models.query_centres(model, np.full((1, length), 7))[0] for length in (1, 9))
    np.testing.assert_allclose(many, one, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(one[..., 8:], np.hypot(one[..., :4], one[..., 4:8]), rtol=1e-5)


def test_the_command_writes_what_the_functions_return(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = "The river was calm, and a small boat lay at the shore. " * 30
    (tmp_path / "book.txt").write_text(text)
    arguments = (
        "retriever --text book.txt --q-filters filters.npy --centres centres.npy --heads heads.npy --rows 2 --length 64"
    )
    assert calibrate.main([*arguments.split(), "--compilation-cache", "off"]) == 0
    assert "filters.npy: (6, " in capsys.readouterr().out
    model, tokenizer = models.load("retriever")
    tokens = np.asarray(tokenizer.encode(text))[:128].reshape(2, 64)
    np.testing.assert_array_equal(np.load("filters.npy"), models.q_filters(model, tokens))
    np.testing.assert_array_equal(np.load("centres.npy"), models.query_centres(model, tokens))
    np.testing.assert_array_equal(np.load("heads.npy"), models.head_scores(model, tokens))
