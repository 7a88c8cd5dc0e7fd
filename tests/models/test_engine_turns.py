"""Turn by turn in one cache: as if the conversation had come at once; and what cannot go on is refused."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

import kvjax
import models
from models import Config, Decoder
from models.config import Rope
from models.layer_caches import LayerCaches
from models.parameters import partition
from tests.models import reference
from tests.models.test_engine_cache import CONFIG, DOCUMENT, NEW, QUESTIONS, bytes_of, held, lengths_of


@pytest.fixture(scope="module")
def model():
    return reference.decoder(CONFIG, reference.parameters(CONFIG))


# A way or two for each layout: test_engine_paths compares the ways under each kind of policy.
@pytest.mark.parametrize(
    ("policy", "each_way"),
    [
        (None, "layers"),
        ("snapkv(window=4)+caote", "one program"),
        ("snapkv(window=4)+caote", "layers"),
        ("sage", "one program"),
        ("tova(heads='group')@model", "layers"),
    ],
    indirect=["each_way"],
)
@pytest.mark.filterwarnings("ignore:.*made to choose once")
def test_a_document_in_two_halves_is_the_document(model, policy, each_way):
    settings = dict(policy=policy, budget=None if policy is None else 16, block=4, outputs="all")
    whole = models.prefill(model, DOCUMENT, **settings)
    first = models.prefill(model, DOCUMENT[:, :28], **settings)
    second = models.prefill(model, DOCUMENT[:, 28:], cache=first.cache, **settings)
    logits = np.concatenate([first.logits, second.logits], axis=1)
    np.testing.assert_allclose(logits, whole.logits, atol=2e-5)
    assert held(second.cache) == held(whole.cache)


def test_rows_of_a_cache_differ_in_what_they_have_seen(model):
    documents = [DOCUMENT[0, :60].tolist(), DOCUMENT[0, 7:40].tolist()]
    settings = dict(policy="h2o+caote", budget=16, block=8)
    kept = models.prefill(model, documents, **settings).cache
    assert kept.next_position.tolist() == [60, 33]
    asked = dict(max_new_tokens=NEW, end=(), **settings)
    both = models.generate(model, QUESTIONS[:2], cache=kept, question=lengths_of(QUESTIONS[:2]), **asked)
    for row, question in enumerate(QUESTIONS[:2]):
        alone = models.generate(model, [documents[row] + question], question=len(question), **asked)
        assert both.tokens[row].tolist() == alone.tokens[0].tolist()


@pytest.mark.parametrize(
    ("policy", "each_way"),
    [("snapkv(window=4)+caote", "layers"), ("h2o@adakv", "one program")],
    indirect=["each_way"],
)
def test_what_a_stream_yields_is_gone_on_from(model, policy, each_way):
    """Turn by turn, the last token of an answer first: as if each turn had been generated."""
    settings = dict(policy=policy, budget=16, block=8, max_new_tokens=6, end=())
    turns, caches = [DOCUMENT[0, :30].tolist(), *QUESTIONS[:3]], {"stream": None, "generate": None}
    last = []
    for turn in turns:
        tokens = [last + turn]
        streamed = list(models.stream(model, tokens, cache=caches["stream"], **settings))
        generated = models.generate(model, tokens, cache=caches["generate"], **settings)
        caches = {"stream": streamed[-1][1], "generate": generated.cache}
        assert [int(token[0]) for token, _ in streamed] == generated.tokens[0].tolist()
        assert held(caches["stream"]) == held(caches["generate"])
        last = [int(streamed[-1][0][0])]
    if each_way == "layers" and "@" not in policy:
        assert isinstance(caches["stream"], LayerCaches)
        whole = models.stacked(caches["stream"])
        assert bytes_of(whole) == bytes_of(models.stacked(caches["stream"])), "what was given stays"
        assert kvjax.evict(whole, -whole.position.astype(jnp.float32), budget=4).num_live.max() == 4


def test_a_conversation_in_one_size_compiles_once(model, compiled_steps):
    settings = dict(policy="snapkv(window=4)+caote", budget=16, block=8, max_new_tokens=7, end=())
    cache, sizes, programs = None, [], []
    for turn in range(6):
        *_, (_, cache) = models.stream(model, [QUESTIONS[turn]], cache=cache, **settings)
        sizes.append(cache.nbytes)
        programs.append(compiled_steps())
    assert len(set(sizes)) == 1
    assert programs[1:] == programs[1:2] * 5


def test_a_smaller_budget_is_reached_though_no_context_comes(model):
    kept = models.prefill(model, DOCUMENT, policy="h2o", budget=24, block=8).cache
    out = models.generate(
        model, [QUESTIONS[0]], cache=kept, policy="h2o", budget=16, block=8, question=5, max_new_tokens=3, end=()
    )
    assert out.cache.num_live.max() == 16 + 5


@pytest.mark.parametrize(
    ("policy", "new", "each_way"),
    [("snapkv(window=8)", 6, "one program"), ("h2o@layer", 1, "layers")],
    indirect=["each_way"],
)
def test_questions_after_questions_stay_within_the_budget(model, policy, new, each_way):
    """No answer is as long as the window, or has a step at all: the question's last block evicts."""
    settings = dict(policy=policy, budget=16, block=8, question=3, max_new_tokens=new, end=())
    cache, held = models.prefill(model, DOCUMENT, policy=policy, budget=16, block=8).cache, []
    for _ in range(5):
        cache = models.generate(model, [[1, 2, 3]], cache=cache, **settings).cache
        held.append(int(cache.num_live.sum()) / cache.num_live.size)
    assert max(held) <= 16 + 3 + new - 1
    assert held[1:] == held[1:2] * 4


def test_a_full_cache_that_is_compressed_shrinks(model, each_way):
    full = models.prefill(model, DOCUMENT).cache
    for when in ("block", "prompt"):
        small = models.prefill(model, [[1]], cache=full, policy="tova", budget=8, block=8, when=when).cache
        assert small.num_live.tolist() == [[[8, 8]]] * 2
        assert small.num_slots <= 16 + 2


def test_progress_counts_what_is_new_in_rows_that_begin_anywhere(model):
    kept, seen = models.prefill(model, [DOCUMENT[0].tolist(), [1, 2, 3]], block=8).cache, []
    steps = models.stream(
        model, [[1], [2] * 30], cache=kept, block=8, max_new_tokens=1, end=(), on_block=lambda *at: seen.append(at)
    )
    assert len(list(steps)) == 1
    assert seen == [(6, 30), (14, 30), (22, 30), (30, 30)]


def test_a_base_that_follows_the_length_is_refused(model):
    config = Config(
        64, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=512,
        rope=Rope(type="dynamic", factor=4.0, original_positions=64),
    )  # fmt: skip
    dynamic = reference.decoder(config, reference.parameters(config))
    kept = models.prefill(dynamic, DOCUMENT).cache
    assert models.prefill(dynamic, [[1, 2, 3]], cache=kept).cache.next_position.tolist() == [63]
    with pytest.raises(
        ValueError,
        match=r"now has 65 tokens, but this model's rotary frequencies depend on the text's length .* 64 tokens",
    ):
        models.prefill(dynamic, [[1] * 5], cache=kept)


def test_a_text_that_crosses_the_length_where_frequencies_change_is_refused():
    config = Config(
        64, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=512,
        rope=Rope(type="longrope", original_positions=62, short_factor=(1.0,) * 4, long_factor=(2.0,) * 4),
    )  # fmt: skip
    model = reference.decoder(config, reference.parameters(config))
    short, long = (models.prefill(model, [[3] * length], reserve=1).cache for length in (60, 63))
    assert models.prefill(model, [[1, 2]], cache=short).cache.next_position.tolist() == [62]
    assert models.prefill(model, [[1, 2]], cache=long).cache.next_position.tolist() == [65]
    with pytest.raises(ValueError, match=r"now has 63 tokens, but this model's rotary frequencies depend .* 62 tokens"):
        models.prefill(model, [[1] * 3], cache=short)
    with pytest.raises(ValueError, match=r"has 60 tokens and up to 3 may follow, .* beyond 62 tokens: let at most 2"):
        models.generate(model, [[3] * 60], max_new_tokens=3)


def test_a_cache_that_a_stream_has_used_up_is_refused(model, each_way):
    steps = models.stream(model, DOCUMENT, policy="h2o", budget=16, block=8, max_new_tokens=4, end=())
    _, first = next(steps)
    next(steps)
    with pytest.raises(ValueError, match="a later step has deleted this cache"):
        models.generate(model, [[1]], cache=first)


def test_sage_warns_where_more_comes_behind_its_choice(model):
    settings = dict(policy="sage", budget=16, block=8, when="published")
    kept = models.prefill(model, DOCUMENT, **settings).cache
    with pytest.warns(UserWarning, match="'sage' is made to choose once, but 3 more tokens follow its choice"):
        models.prefill(model, [[1, 2, 3]], cache=kept, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        models.generate(model, [[1, 2, 3]], cache=kept, question=3, max_new_tokens=2, **settings)


def test_rows_of_several_kinds_of_integers_keep_their_tokens(model):
    rows = [np.array([1, 2, 3], np.uint8), np.array([300, 2], np.int64)]
    with pytest.raises(ValueError, match="token 300 is outside the vocabulary of 64"):
        models.prefill(model, rows)
    with pytest.raises(ValueError, match=r"tokens are float64 \(2, 3\)"):
        models.prefill(model, [[1, 2, 3], [1.7, 2]])


def test_a_ratio_is_of_all_that_was_seen(model):
    kept = models.prefill(model, DOCUMENT, policy="h2o", budget=0.25, block=8).cache
    more = models.prefill(model, DOCUMENT[:, :20], cache=kept, policy="h2o", budget=0.25, block=8).cache
    assert (kept.num_live.max(), more.num_live.max()) == (15, 20)


def test_a_mesh_goes_on_as_one_device():
    if jax.device_count() < 8:
        pytest.skip("needs eight devices; conftest.py forces them on a CPU")
    config = Config(48, 32, 48, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8)
    weights = reference.parameters(config)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "tensor"))
    many = Decoder(config, {n: jax.device_put(a, NamedSharding(mesh, partition(n, mesh))) for n, a in weights.items()})
    settings = dict(policy="h2o+caote", budget=16, block=8)
    document, asked = np.tile(DOCUMENT % 48, (2, 1)), [[token % 48 for token in row] for row in QUESTIONS]
    answers = []
    for model in (reference.decoder(config, weights), many):
        kept = kvjax.repeat(models.prefill(model, document, **settings).cache, 10)
        out = models.generate(
            model, asked, cache=kept, question=lengths_of(asked), max_new_tokens=NEW, end=(), **settings
        )
        answers.append((out.tokens.tolist(), np.sort(out.cache.position).tolist()))
    assert answers[0] == answers[1]
    assert out.cache.key.sharding.spec == jax.sharding.PartitionSpec(None, "data", "tensor")


def test_prompts_of_any_lengths_are_a_list(model):
    rows = [DOCUMENT[0, :13].tolist(), QUESTIONS[0], DOCUMENT[0].tolist()]
    settings = dict(policy="h2o", budget=12, block=8, question=[3, 0, 7], max_new_tokens=4, end=())
    padded = np.zeros((3, 60), int)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    listed = models.generate(model, rows, **settings)
    arrays = models.generate(model, padded, lengths=lengths_of(rows), **settings)
    assert listed.tokens.tolist() == arrays.tokens.tolist()


REFUSED = {
    "another number of rows": (dict(tokens=QUESTIONS[:3]), r"1 rows, but 3 prompts .* kvjax.repeat\(cache, 3\)"),
    "another policy": (dict(policy="tova", budget=16), "the cache's policy state is not that of 'tova': give the"),
    "an allocation": (dict(policy="h2o@layer", budget=16), "the cache is plain, but 'h2o@layer' divides"),
    "query heads": (dict(policy="sage(heads='query')", budget=16), "holds 2 heads per layer, but .* is for 4"),
    "a selection": (dict(select="oracle", budget=4), "a selection remembers tokens outside the cache"),
    "no cache": (dict(cache="kept"), "the cache is a str; give what models.prefill"),
    "all that prefill gave": (
        dict(
            cache=models.Prefilled(
                kvjax.empty_cache(None, layers=2, kv_heads=2, query_heads=4, head_dim=8, budget=4), None
            )
        ),
        "the cache is a Prefilled; give its .cache",
    ),
    "too much for a full cache": (dict(max_new_tokens=500), "take 521 positions, but the model has 512"),
}


@pytest.mark.parametrize(("given", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_go_on_is_refused_in_a_sentence(model, given, sentence):
    kept = models.prefill(model, DOCUMENT, policy="h2o", budget=16, block=8).cache
    given = {"tokens": [QUESTIONS[0]], "cache": kept, **given}
    with pytest.raises(ValueError, match=sentence):
        models.generate(model, given.pop("tokens"), **given)


def test_the_cache_of_another_model_is_refused(model):
    other = Config(64, 32, 48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8)
    kept = models.prefill(reference.decoder(other, reference.parameters(other)), DOCUMENT).cache
    with pytest.raises(ValueError, match="of another model: it has 3 layers and 2 heads of dimension 8"):
        models.generate(model, [QUESTIONS[0]], cache=kept)


def test_a_paged_cache_asks_for_the_allocation_that_made_it(model):
    kept = models.prefill(model, DOCUMENT, policy="h2o@layer", budget=16, block=8).cache
    with pytest.raises(ValueError, match="the cache is paged, but 'h2o' divides the slots in an even way"):
        models.generate(model, [QUESTIONS[0]], cache=kept, policy="h2o", budget=16)
