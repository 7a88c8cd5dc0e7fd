"""Slots and pages against numbers worked out by hand."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax import allocation
from kvjax._src.capacity import CacheSpec, beyond_mean, rounded_up

SIZES = [(1, 1), (7, 7), (16, 16), (17, 18), (64, 64), (100, 104), (127, 128), (1025, 1152)]


@pytest.mark.parametrize(("given", "expected"), SIZES)
def test_a_size_is_rounded_up_by_steps_of_its_octave(given, expected):
    assert rounded_up(given) == expected


WINDOWS = (None, 6)  # of two layers


def spec(name: str = "uniform", ways: tuple[int, int] = (1, 2), rows: int = 2, **sizes) -> CacheSpec:
    policy = dataclasses.replace(kvjax.parse("h2o"), allocation=getattr(allocation, name)(**sizes.pop("made", {})))
    mesh = jax.sharding.AbstractMesh(ways, ("data", "tensor"))
    return CacheSpec(rows, 4, 8, windows=sizes.pop("windows", WINDOWS), policy=policy, mesh=mesh, **sizes)


def test_heads_of_one_device_may_win_from_others_what_their_cap_allows():
    """8 tokens per head, 6 in the layer with the window: 14 in both layers. No head of that layer ever holds more."""
    without_cap, capped = allocation.layer(cap=None), allocation.layer(cap=1.5)
    assert beyond_mean(without_cap, WINDOWS, 4, 2, 8) == 14  # twice the mean, of two devices; a head alone may hold 38
    assert beyond_mean(without_cap, WINDOWS, 4, 4, 8) == 38 - 14
    assert beyond_mean(capped, WINDOWS, 4, 2, 8) == 12 + 6 - 14
    assert beyond_mean(without_cap, WINDOWS, 4, 1, 8) == beyond_mean(allocation.uniform(), WINDOWS, 4, 2, 8) == 0


def test_rows_have_slots_for_what_enters_and_no_more_than_the_limit():
    def pages(spec, **given):  # of one slot each: two heads are on a device
        return spec.sized([8, 3], room=4, step=2, **given).pages

    # 12 and, of the window and a step, 8; then 7 and 7.
    alike = dataclasses.replace(spec(), policy=kvjax.parse("h2o@pyramid"))  # which a mesh does not change
    assert pages(alike) == 2 * 20 + 2 * 14
    assert pages(alike, limit=10) == 2 * 18 + 2 * 14
    competing = spec("layer", made=dict(cap=None))
    assert pages(competing) == 2 * (20 + 14) + 2 * (14 + 6)
    assert pages(competing, limit=10) == 2 * 18 + 2 * 18


def test_pages_are_those_of_the_fullest_device():
    of_devices = spec(ways=(2, 2), rows=4, page_size=4)
    slots = np.array([[50, 10], [20, 90], [30, 30], [40, 40]])  # of four rows, of which a device has two
    assert of_devices.pages_of(slots) == (10 + 90 + 8 * 3) // 4  # of two heads in two layers of two rows
    held = np.array([[1, 2, 3, 4, 10, 20, 30, 40]])  # a layer's heads lie side by side
    assert of_devices.on_devices(held).tolist() == [[33, 77]]


def test_no_cache_is_larger_than_its_limit():
    plain = spec(rows=1, windows=(None,))
    assert plain.sized([24], room=8, limit=30) == dataclasses.replace(plain, layer_slots=(30,))
    full = spec("layer", rows=1, windows=(None,), made=dict(cap=None))
    assert full.sized([24], room=8).slots == 4 * 24 + 8
    assert full.sized([24], room=8, limit=30).slots == 30


def test_a_plain_layer_with_a_window_has_slots_for_it_and_what_comes_in_at_once():
    plain = spec(windows=(6, None, 11), ways=(1, 1))
    assert plain.sized([8, 3], room=6, step=2).layer_slots == (6 + 2, 8 + 6, 11 + 2)
    assert plain.sized([8, 3], room=6).layer_slots == (6 + 6, 8 + 6, 8 + 6)  # all of it at once
    assert plain.sized([8, 3], room=6, step=2, limit=10).layer_slots == (8, 10, 10)


@pytest.mark.parametrize("policy", ["h2o", "h2o@layer(cap=1)"])
def test_a_cache_s_layer_with_a_window_has_room_for_the_block_beside_it(policy):
    sizes = dict(layers=2, kv_heads=1, head_dim=2, page_size=1, windows=(None, 4))
    assert kvjax.memory(policy, **sizes, budget=8, block=3).slots == ((8 + 3) + (4 + 3)) // 2
