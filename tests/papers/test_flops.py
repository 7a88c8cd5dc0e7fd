"""What a predictor adds to a step: counted in compiled programs and by hand."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from benchmarks import floors
from models.butler import Butler, ButlerConfig
from models.parameters import parameter_shapes
from papers.__main__ import main
from papers.predictor import flops as benchmark

# Sizes at which the products of matrices are nearly all that is computed.
SMALL = models.Config(512, 128, 384, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=64, tie_embeddings=True)
PREDICTOR = ButlerConfig(128, num_layers=5, num_heads=4, hidden=96, dim=16)


def test_compiled_counts_are_the_products_of_a_hand_count():
    tokens, slots = 1, 32
    rest, layer = benchmark.model_cost(SMALL, tokens, slots)
    network, logits = benchmark.predictor_cost(PREDICTOR, tokens, slots)
    counted = [part.flops for part in (rest, layer, network, logits)]
    E, N, r, H, D = PREDICTOR.hidden_size, SMALL.num_heads, PREDICTOR.reduced, PREDICTOR.hidden, PREDICTOR.dim
    network_by_hand = 2 * (
        E * r + 3 * r * r + 2 * r * r + 2 * r * E + 2 * (E * H + H * PREDICTOR.predicted_layers * N * D)
    )
    products = *floors.product_flops(SMALL, tokens, slots, tokens), network_by_hand + 4 * slots * r, 2 * slots * N * D
    by_hand = np.array(products)  # 2 m n k for each product of matrices
    ratios = np.array(counted) / by_hand
    assert (ratios >= 1).all()  # beside the products there are sums, masks and norms
    np.testing.assert_allclose(ratios, 1, atol=0.05)


def test_floors_are_the_arrays_that_a_step_holds():
    slots = 40
    floor = benchmark.floor_numbers(SMALL, PREDICTOR, slots)
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in PREDICTOR.shapes.items()}
    cache = jax.eval_shape(lambda weights: Butler(PREDICTOR, weights).init_cache(1, slots), weights)
    assert floor.logits * PREDICTOR.predicted_layers == cache.importance_key.size
    own = sum(np.prod(shape) for shape in PREDICTOR.shapes.values())
    assert floor.network == own + cache.key.size + cache.value.size
    sizes = {name: np.prod(shape) for name, shape in parameter_shapes(SMALL).items()}
    keys_and_values = 2 * SMALL.num_layers * SMALL.num_kv_heads * slots * SMALL.head_dim
    assert floor.rest + SMALL.num_layers * floor.layer == sum(sizes.values()) + keys_and_values


def test_what_a_group_reads_lies_between_agreement_and_none():
    config = benchmark.MODELS["Llama-3.2-1B"]  # G = 4, 2 K D = 1,024
    few, many = (benchmark.selected_numbers(config, tokens, 1_000) for tokens in (100, 500))
    assert few["heads"] == few["apart"] == 4 * few["same"] == 400 * 1024
    assert few["same"] < few["chance"] < few["apart"]
    assert many["heads"] == 2 * 1_000 * 1024 and many["apart"] == 1_000 * 1024  # more than there is, and all


@pytest.mark.parametrize("reading", ["heads", "same", "chance", "apart"])
@pytest.mark.parametrize("name", list(benchmark.MODELS))
def test_break_even_is_where_the_bytes_of_a_step_cross(name, reading):
    config = benchmark.MODELS[name]
    predictor = ButlerConfig.of(config)
    bound = benchmark.largest_share(config, predictor, reading)
    assert benchmark.break_even(config, predictor, 1.01 * bound, reading) is None
    slots = benchmark.break_even(config, predictor, 0.5 * bound, reading)
    ratios = [benchmark.bytes_ratios(config, predictor, 0.5 * bound, n)[reading] for n in (slots - 40, slots + 40)]
    assert ratios[0] > 1 > ratios[1]


def test_the_command_writes_what_it_prints(tmp_path, capsys):
    out = tmp_path / "counts.json"
    arguments = ["--models", "Llama-3.2-1B", "--lengths", "64", "--contexts", "256", "--shares", "0.1"]
    assert main(["flops", *arguments, "--json", str(out)]) == 0
    results, printed = json.loads(out.read_text())["results"], capsys.readouterr().out
    assert {part: len(rows) for part, rows in results.items()} == {"prefill": 1, "decode": 1, "reading": 1}
    forward, step = results["prefill"][0], results["decode"][0]
    added = forward["network_flops"] + forward["importance_flops"]
    assert forward["share"] == pytest.approx(added / forward["model_flops"])
    assert step["selections"][0]["tokens"] == 26 + 4
    assert f"{forward['share']:.2%}" in printed
