"""RestoreKV: what stays, and the restore tokens' keys and values, are kvpress' (files: make_restorekv.py)."""

import functools
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

import kvjax
import models
from models.repeating import asking
from models.restoring import FILE as TOKENS
from tests.models.make_restorekv import FILE, KEPT, OWN, RESTORED
from tests.models.test_kvzip import in_order, kept, kvpress_model, slots_of


@functools.cache
def fixture():
    with np.load(FILE) as arrays:
        return dict(arrays)


@functools.cache
def restorer():
    return models.load_restorer(OWN)


def prefilled(budget, **settings):
    words = kvjax.RepeatPrompt(*(tuple(fixture()[part].tolist()) for part in ("first", "following", "suffix")))
    policy = asking(kvjax.parse("kvzip(sinks=0)"), words)  # without a template before the text it protects none
    tokens = fixture()["tokens"][None].astype(np.int32)
    return models.prefill_restored(kvpress_model(), restorer(), tokens, policy=policy, budget=budget, **settings)


def sets(cache, budget):
    """Return what stays of the text, ours and kvpress', [L, K, T]; the restore tokens do."""
    T = fixture()["tokens"].size
    stays = kept(cache, T + RESTORED)[:, 0]
    assert stays[..., T:].all() and cache.next_position.tolist() == [T + RESTORED]
    expected = np.unpackbits(fixture()[f"kept/{budget}"], axis=-1, count=T).astype(bool)
    return stays[..., :T], expected


@pytest.mark.matrix
@pytest.mark.parametrize("budget", KEPT)
def test_what_stays_and_what_restores_are_those_of_kvpress(budget):
    T = fixture()["tokens"].size
    cache = prefilled(budget)
    np.testing.assert_array_equal(*sets(cache, budget))
    for name in ("key", "value"):
        found = slots_of(cache, lambda own: getattr(own, name)[..., 0])  # noqa: B023
        own = in_order(cache, found, T + RESTORED, 0)[:, 0, :, T:]
        np.testing.assert_allclose(own, fixture()[name][..., 0], rtol=2e-4, atol=2e-5)


@pytest.mark.matrix
def test_a_question_is_answered_behind_the_restore_tokens():
    cache = prefilled(40)
    found = models.generate(kvpress_model(), [[5, 7]], cache=cache, max_new_tokens=2)
    assert found.lengths.tolist() == [2]
    assert found.cache.next_position.tolist() == [fixture()["tokens"].size + RESTORED + 2 + 1]


def test_a_budget_that_the_restore_tokens_fill_is_refused():
    with pytest.raises(ValueError, match="budget is 8; the 8 restore tokens take 8 of its slots"):
        prefilled(RESTORED)
    with pytest.raises(ValueError, match="the policy is full"):
        models.prefill_restored(kvpress_model(), restorer(), [range(20)], policy="full", budget=10)


def test_a_folder_without_tokens_or_with_others_is_refused(tmp_path):
    shutil.copytree(OWN, tmp_path / "own")
    for wrong, said in (
        (np.ones((2, 3), np.float32), r"\(2, 3\); expected finite numbers \[R, "),
        (np.full((2, restorer().config.hidden_size), np.nan, np.float32), "expected finite numbers"),
    ):
        save_file({"restore_embeddings": wrong}, tmp_path / "own" / TOKENS)
        with pytest.raises(ValueError, match=said):
            models.load_restorer(tmp_path / "own")
    (tmp_path / "own" / TOKENS).write_bytes(b"no")
    with pytest.raises(ValueError, match="truncated or corrupted"):
        models.load_restorer(tmp_path / "own")
    (tmp_path / "own" / TOKENS).unlink()
    with pytest.raises(FileNotFoundError, match="has no restore_embeddings"):
        models.load_restorer(tmp_path / "own")
