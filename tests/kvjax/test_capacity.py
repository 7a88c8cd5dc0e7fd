"""Slots and pages against numbers worked out by hand."""

import numpy as np
import pytest

import kvjax
from kvjax import allocation
from kvjax.capacity import Capacity, Demand, Layout, capacity, rounded_up

SIZES = [((1,), 1), ((7,), 7), ((16,), 16), ((17,), 18), ((100,), 104), ((100, 4), 112), ((100, 1), 128)]
BESIDE = [((64, 8, 64), 64), ((100, 8, 28), 112)]  # the whole buffer's octave, 128, has steps of 16


@pytest.mark.parametrize(("given", "expected"), SIZES + BESIDE)
def test_a_size_is_rounded_up_by_steps_of_its_octave(given, expected):
    assert rounded_up(*given) == expected


WINDOWS = (None, 6)  # of two layers


def layout(name: str = "uniform", ways: tuple[int, int] = (1, 2), **sizes) -> Layout:
    return Layout(4, WINDOWS, getattr(allocation, name)(**sizes.pop("made", {})), ways=ways, **sizes)


def test_heads_of_one_device_may_win_from_others_what_their_cap_allows():
    """8 tokens per head, 6 in the layer with the window: 14 in both layers. No head of that layer ever holds more."""
    without_cap, capped = dict(made=dict(cap=None)), dict(made=dict(cap=1.5))
    assert layout("layer", **without_cap).excess(8) == 14  # twice the mean, of two devices; a head alone may hold 38
    assert layout("layer", (1, 4), **without_cap).excess(8) == 38 - 14
    assert layout("layer", **capped).excess(8) == 12 + 6 - 14
    assert layout("layer", (1, 1), **without_cap).excess(8) == layout().excess(8) == 0


def test_rows_have_slots_for_what_enters_and_no_more_than_the_limit():
    demand = Demand(held=np.array([8, 3]), room=4, step=2)
    # 12 and, of the window and a step, 8; then 7 and 7. Two heads are on a device.
    assert layout().slots_of_rows(demand).tolist() == [[2 * 20], [2 * 14]]
    assert layout().slots_of_rows(demand._replace(limit=10)).tolist() == [[2 * 18], [2 * 14]]
    competing = layout("layer", made=dict(cap=None))
    assert competing.slots_of_rows(demand).tolist() == [[2 * (20 + 14)], [2 * (14 + 6)]]
    assert competing.slots_of_rows(demand._replace(limit=10)).tolist() == [[2 * 18], [2 * 18]]


def test_pages_are_those_of_the_fullest_device():
    of_devices = layout(ways=(2, 2), page_size=4)
    slots = np.array([[50, 10], [20, 90], [30, 30], [40, 40]])  # of four rows, of which a device has two
    assert of_devices.pages(slots) == (10 + 90 + 8 * 3) // 4  # of two heads in two layers of two rows
    held = np.array([[1, 2, 3, 4, 10, 20, 30, 40]])  # a layer's heads lie side by side
    assert of_devices.on_devices(held).tolist() == [[33, 77]]


def test_no_cache_is_larger_than_its_limit():
    demand, full = Demand(np.array([24]), room=8, step=8), Layout(2, (None,), allocation.layer(cap=None))
    assert capacity(Layout(2, (None,)), demand._replace(limit=30), paged=False) == Capacity(30)
    assert capacity(full, demand, paged=True).slots == 2 * 24 + 8
    assert capacity(full, demand._replace(limit=30), paged=True).slots == 30


def test_a_cache_s_layer_with_a_window_has_room_for_the_block_beside_it():
    sizes = dict(layers=2, kv_heads=1, head_dim=2, page_size=1, windows=(None, 4))
    assert kvjax.memory("h2o", **sizes, budget=8, block=3).slots == ((8 + 3) + (4 + 3)) // 2
