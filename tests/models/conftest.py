"""Both ways through the layers on a CPU: one program scans them, or the host calls one after the other."""

import pytest

from models import by_layer, host_steps


@pytest.fixture
def run_by_layer(monkeypatch):
    """Small models run as large ones do on a CPU; ``run_by_layer(False)`` takes that back."""

    def choose(layers=True):
        monkeypatch.setattr(by_layer, "LARGE_LAYER", 0 if layers else 1 << 62)

    choose()
    return choose


@pytest.fixture(params=["one program", "layers"])
def each_way(request, run_by_layer):
    """A test with it runs both ways; the value is the way's name."""
    run_by_layer(request.param == "layers")
    return request.param


@pytest.fixture
def compiled_steps():
    """Gives a function that counts the programs compiled since the test began, for blocks and tokens of a stream."""
    programs = (host_steps.block_step, host_steps.token_step, by_layer._run_layer)
    before = sum(program._cache_size() for program in programs)
    return lambda: sum(program._cache_size() for program in programs) - before
