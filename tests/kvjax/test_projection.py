"""What scores read of W_O, against W_O itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax._src.projection import measure

N, K, G, D = 6, 2, 3, 4


project = jax.jit(lambda weight, kinds: kvjax.output_projection(weight, K, kinds), static_argnums=1)


def draw(*lead: int, width: int = 16) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(*lead, N, D, width))


@pytest.mark.parametrize("lead", [(), (5,)], ids=["one layer", "layers"])
@pytest.mark.parametrize("width", [G * D + 5, G * D, 3])
def test_the_factor_is_as_long_as_w_o_for_every_change_of_a_group(lead, width):
    weight = draw(*lead, width=width)
    with jax.enable_x64(True):
        made = project(weight, ("factor",))
    assert made.factor.shape == (*lead, K, G, D, min(G * D, width)) and made.gram is None and made.weight is None
    blocks = weight.reshape(*lead, K, G * D, width)
    factor = np.asarray(made.factor).reshape(*lead, K, G * D, -1)
    np.testing.assert_allclose(
        factor @ factor.swapaxes(-1, -2), blocks @ blocks.swapaxes(-1, -2), rtol=1e-9, atol=1e-12
    )


def test_the_gram_is_of_each_query_head_and_the_joint_one_of_their_sum():
    weight = draw()
    with jax.enable_x64(True):
        made = project(weight, ("gram", "joint"))
    np.testing.assert_allclose(made.gram, (weight @ weight.swapaxes(-1, -2)).reshape(K, G, D, D), rtol=1e-12)
    whole = weight.reshape(K, G, D, -1).sum(axis=1)
    np.testing.assert_allclose(made.joint, whole @ whole.swapaxes(-1, -2), rtol=1e-12)


def test_the_weight_keeps_its_dtype_and_the_others_are_float32():
    made = project(draw().astype(jnp.bfloat16), ("weight", "factor", "gram", "joint"))
    assert [x.dtype for x in made] == [jnp.bfloat16, jnp.float32, jnp.float32, jnp.float32]
    assert made.weight.shape == (K, G, D, 16)


@pytest.mark.parametrize("cross", [True, False])
def test_measure_gives_one_part_alone_made_of_what_is_there(cross):
    made = project(draw().astype(np.float32), ("weight", "factor", "gram"))

    def products(factor):
        return np.einsum("kgdf,khef->kgdhe", factor, factor)

    gram = np.asarray(made.gram) if not cross else products(np.asarray(made.factor))
    forms = {"all": made, "W_O": made.weight, "its parts": kvjax.OutputProjection(weight=made.weight)}
    for name, form in forms.items():
        part = jax.jit(lambda form: measure(form, cross, (2, K, G, D), jnp.float32))(form)
        assert (part.factor is None, part.gram is None, part.weight) == (not cross, cross, None)
        result = part.gram if not cross else products(np.asarray(part.factor))
        np.testing.assert_allclose(result, gram, rtol=1e-4, atol=1e-4, err_msg=name)
