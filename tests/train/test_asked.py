"""Checks what answers feel against the formula by hand, and what may not count."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.models.tiny import CONFIG, decoder
from tests.tiers import matrix
from train import answers
from train.asked import felt_by_answers
from train.scorer import target_of

TURNS = [([3, 9, 27, 14, 50, 8], [21, 33]), ([5, 40], [17, 2])]  # text and question, answer; question, answer


def by_hand(model, tokens, text, learned):
    """Compute the score from the weights of every query, and a gradient of one logit at a time."""
    config, T = model.config, len(tokens)
    position = jnp.arange(T)
    N, K, D = config.num_heads, config.num_kv_heads, config.head_dim

    def run(shift):
        seen = []

        def attend(_, layer, window, query, key, value):
            query, key, value = query[0], jnp.repeat(key[0], N // K, 1), jnp.repeat(value[0], N // K, 1)
            logits = jnp.einsum("tnd,snd->nts", query, key) / np.sqrt(D)
            weights = jax.nn.softmax(jnp.where(position[:, None] >= position, logits, -jnp.inf), axis=-1)
            seen.append((weights, value))
            return (jnp.einsum("nts,snd->tnd", weights, value) + shift[layer])[None], None, None

        hidden, *_ = model.run(tokens[None], position[None], jnp.array([T]), attend, None)
        return model.logits(hidden[0]), seen

    nothing = jnp.zeros((config.num_layers, T, N, D))
    _, seen = run(nothing)
    gradient = sum(
        jax.grad(lambda shift, t=t: (lambda row: row[tokens[t + 1]] - row.mean())(run(shift)[0][t]))(nothing)
        for t in np.flatnonzero(learned)
    )
    found = np.zeros((config.num_layers, T, K))
    for layer, (weights, value) in enumerate(seen):
        for head in range(N):
            for token in range(text):
                most = max(
                    float(weights[head, t, token] * jnp.linalg.norm(gradient[layer, t, head])) for t in range(text, T)
                )
                felt = most * float(jnp.linalg.norm(value[token, head]))
                found[layer, token, head // (N // K)] = max(found[layer, token, head // (N // K)], felt)
    return found


@matrix
def test_what_answers_feel_is_the_product_by_hand():
    model, fed = decoder(CONFIG), answers.model_batch(answers.row_of(TURNS, 15)[None])
    text = int(fed.lengths[0]) + 1 - int(fed.answers[0])
    found = felt_by_answers(model, fed.tokens, jnp.array([text]), fed.learned)
    assert text == 6
    expected = by_hand(model, jnp.asarray(fed.tokens[0]), text, fed.learned[0])
    np.testing.assert_allclose(found[:, 0], expected, rtol=2e-4, atol=1e-7)


@matrix
def test_padding_and_other_rows_change_nothing_and_the_text_alone_counts():
    model = decoder(CONFIG)
    own = answers.row_of(TURNS, 15)
    other = answers.row_of([([1, 2], [3]), ([4, 5, 6], [7, 8, 9])], 15)
    target = target_of(model, "asked")
    both, alone = target(np.stack([own, other])), target(own[None])
    np.testing.assert_allclose(both.score[:, :1], alone.score, rtol=1e-5)
    assert both.counted.sum(axis=1).tolist() == [6, 2]
    assert float(jnp.max(jnp.where(both.counted[..., None], 0, both.score))) == 0
    above = np.asarray(alone.score)[:, 0, :6] > 0.5
    assert above.sum() == 3  # a tenth of 24
