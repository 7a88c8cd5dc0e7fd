"""Long runs are reported in parts, and every answer is compared with the one alone."""

import jax.numpy as jnp
import numpy as np

import models
from benchmarks import soak
from tests.tiers import matrix

CONFIG = models.Config(64, 32, 64, num_layers=1, num_heads=2, num_kv_heads=1, max_positions=32)


def test_a_prompt_longer_than_the_positions_is_fed_whole_and_compiles_in_its_first_part(model):
    rows = soak.prompt_parts(model, 40 * 8, "streaming", 16, 8)
    assert [row["done"] for row in rows] == [16 * (part + 1) for part in range(soak.PARTS)]
    assert sum(row["compilations"] for row in rows[1:]) == 0
    (_, said) = soak.tables(rows)["One prompt through one cache"]
    assert "Programs compiled after the first quarter: 0." in said


@matrix
def test_answers_among_others_are_those_alone_and_cancelled_ones_their_beginning(model, monkeypatch):
    for name, value in dict(POOL=3, LONGEST=12, MOST=4, CANCELLED=0.2).items():
        monkeypatch.setattr(soak, name, value)
    rows = soak.request_figures(model, 40, 2, "streaming", 8, 4)
    last = rows[-1]
    assert (last["wrong"], last["lost"], last["idle"]) == (0, 0, True)
    assert last["ended"] + last["cancelled"] == 40
    assert min(last["ended"], last["cancelled"]) > 0
    assert len(rows) == soak.PARTS


@matrix
def test_an_answer_that_differs_is_counted(model, monkeypatch):
    for name, value in dict(POOL=1, LONGEST=4, MOST=2).items():
        monkeypatch.setattr(soak, name, value)
    other = jnp.full((1, 2), CONFIG.vocab_size)  # a token that no answer has
    monkeypatch.setattr(models, "generate", lambda *_, **__: models.Generation(other, None, np.array([2])))
    last = soak.request_figures(model, 20, 2, "streaming", 8, 4)[-1]
    assert last["wrong"] >= last["ended"] > 0
