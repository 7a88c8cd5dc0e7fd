"""Fidelity on tiny random models: exact for the full cache, and equal to attention written out in NumPy."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import kvjax
import models
from evals import tasks
from evals.answering import Feed
from evals.run_settings import RECENCY, Setting
from papers.caote import fidelity
from tests.models import reference
from tests.models.tiny import config, decoder
from tests.tiers import matrix

SMALL = ["--lengths", "256", "--samples", "2", "--facts", "4", "--batch", "2", "--block", "64", "--budgets", "32"]


def random_samples(count=5, seed=0):
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(count):
        length, answer = int(rng.integers(40, 60)), int(rng.integers(2, 5))
        tokens = rng.integers(3, 64, length + answer).tolist()
        drawn.append(tasks.Sample("", "", tokens[:length], tokens[length:], length - 6))
    return drawn


def test_the_full_cache_is_exact():
    setting = Setting("full", None, "prompt", "known")
    (result,) = fidelity.measure(decoder(), random_samples(), [setting], feed=Feed(16))
    assert (result["error"], result["cosine"], result["kl"]) == (0, 1, 0)
    assert (result["output_error"], result["output_cosine"]) == (0, 1)
    lengths = [len(sample.tokens) for sample in random_samples()]
    assert np.unique(result["retained"]["smallest"]) == min(lengths)
    assert np.unique(result["retained"]["largest"]) == max(lengths)


def test_attention_outputs_are_those_of_numpy_over_the_tokens_that_are_left():
    policy, model, samples = (
        "snapkv(window=4)@model",
        decoder(config(num_layers=1)),
        random_samples(3),
    )
    longest = max(len(s.tokens) for s in samples)
    tokens = np.array([s.tokens + [0] * (longest - len(s.tokens)) for s in samples])
    lengths = np.array([len(s.tokens) for s in samples])
    answers = np.array([s.answer_tokens[:2] for s in samples])
    position = lengths[:, None] + np.arange(2)
    cache = models.prefill(
        model, tokens, lengths=lengths, policy=policy, budget=12, block=16, when="prompt", reserve=2
    ).cache
    got = jax.tree.map(np.asarray, fidelity.outputs(model, cache, answers, position, lengths))
    weight = {name.removeprefix("layers."): array for name, array in reference.parameters(model.config).items()}
    angle, _ = reference.inverse_frequencies(model.config.rope, model.config.head_dim, longest)
    held, heads = jax.jit(lambda cache: cache.layer(0))(cache), cache.heads_shape[-1]
    held = {name: np.asarray(getattr(held, name)) for name in ("position", "key", "value")}
    for row in range(3):
        x = weight["embedding"][answers[row]].astype(np.float64)
        h = reference.norm(x, weight["attention_norm"][0], model.config.norm_epsilon)
        q, k, v = (np.einsum("te,ehd->thd", h, weight[name][0]) for name in ("query", "key", "value"))
        q, k = (reference.rope(x, position[row][:, None], angle) for x in (q, k))
        out = np.zeros((2, 4, 8))
        for n in range(4):
            head, own = n * heads // 4, n // 2
            live = held["position"][row, head] >= 0
            keys = np.concatenate([held["key"][row, head, live], k[:, own]])
            values = np.concatenate([held["value"][row, head, live], v[:, own]])
            for t in range(2):
                seen = live.sum() + t + 1
                out[t, n] = reference.softmax(keys[:seen] @ q[t, n] / np.sqrt(8)) @ values[:seen]
        np.testing.assert_allclose(got.attention[0, row], out.reshape(2, -1), rtol=2e-4, atol=2e-5)
        projected = np.einsum("tnd,nde->te", out, weight["output"][0].reshape(4, 8, -1))
        np.testing.assert_allclose(got.projected[0, row], projected, rtol=2e-4, atol=2e-4)


def test_differences_by_hand():
    def of(attention, projected, logits):
        return fidelity.Outputs(*map(np.array, ([[attention]], [[projected]], [logits])))

    full = of([[3.0, 4.0], [1.0, 0.0], [9.0, 9.0]], [[2.0], [2.0], [9.0]], [[0.0, 0.0], [0.0, 0.0], [5.0, 0.0]])
    evicted = of(
        [[3.0, 0.0], [0.0, 1.0], [0.0, 0.0]], [[1.0], [-2.0], [0.0]], [[0.0, 0.0], [np.log(3), 0.0], [0.0, 9.0]]
    )
    found = fidelity.differences(full, evicted, np.array([[True, True, False]]))
    assert found["error"] == pytest.approx((4 / 5 + np.sqrt(2)) / 2)
    assert found["cosine"] == pytest.approx((3 / 5 + 0) / 2)
    assert found["output_error"] == pytest.approx((0.5 + 2) / 2)
    assert found["output_cosine"] == pytest.approx(0)
    assert found["kl"] == pytest.approx(0.5 * (0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(0.5 / 0.25)), abs=1e-6)


@pytest.mark.parametrize(
    "laprox, attention, snapkv",
    [
        ("laprox(window=8)@model", "laprox(window=8,target='attention')@model", "snapkv(window=8,kernel=7)"),
        ("laprox(kernel=13)@model", "laprox(kernel=13,target='attention')@model", "snapkv(kernel=13)"),
        ("laprox@layer", "laprox(target='attention')@layer", "snapkv(kernel=7)"),
    ],
)
def test_a_policy_is_compared_with_those_that_its_paper_compares(laprox, attention, snapkv):
    def result(policy, error):
        values = {"error": [[error, 0.5]] * 6, "output_cosine": [[1 - error, 0.5]] * 6}
        return {"policy": policy, "budget": 8, "when": "prompt", "question": "known", "by_sample": values}

    errors = {"h2o@layer": 0.4, "h2o+caote@layer": 0.2, laprox: 0.2, attention: 0.1, snapkv: 0.3}
    rows = fidelity.compare([result(policy, error) for policy, error in errors.items()])
    assert [(row["paper"], row["verdict"], row["difference"]) for row in rows] == [
        ("CAOTE", "holds", pytest.approx(0.1)),
        ("LaProx", "does not", pytest.approx(-0.05)),
        ("LaProx", "holds", pytest.approx(0.05)),
    ]
    assert rows[0]["layers"] == ["holds", "not shown"]


@matrix
def test_the_command_writes_table_json_and_pictures(tmp_path, run_eval):
    heads = tmp_path / "heads.png"
    data, printed = run_eval("fidelity", "--policies", "full,tova,tova+caote", *SMALL, "--heads", str(heads))
    assert [r["policy"] for r in data["results"]] == ["full", RECENCY, "tova", "tova+caote"]
    assert all(r["policy"] in printed for r in data["results"])
    assert data["results"][0]["kl"] < 1e-12  # two programs
    assert [claim["paper"] for claim in data["claims"]] == ["CAOTE"]
    assert heads.read_bytes().startswith(b"\x89PNG")


def test_pages_on_a_mesh_get_room_for_more_tokens_on_each_device():
    mesh = Mesh([jax.devices()[:1]], ("data", "tensor"))
    sizes = dict(layers=2, kv_heads=2, query_heads=2, head_dim=2, budget=4, block=4, page_size=2)

    def made():
        return kvjax.empty_cache("h2o@layer", mesh=mesh, **sizes)

    before, after = jax.eval_shape(made), jax.eval_shape(lambda: fidelity._for_more(made(), 3))
    assert after.num_pages == before.num_pages + kvjax.pages_for(4 * 3, 4, 2)
    assert after.num_slots >= before.num_slots + 3 and after.heads_shape == before.heads_shape
