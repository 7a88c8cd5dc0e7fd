"""Both ways through the layers: the host calls one after the other, as on a CPU, or one program has them all."""

import pytest

from models import driver, steps


@pytest.fixture
def run_by_layer(monkeypatch):
    """``run_by_layer(False)`` runs a model on a CPU as on an accelerator, in one program; without it, by layer."""
    usual = driver.by_layer

    def choose(layers=True):
        monkeypatch.setattr(driver, "by_layer", lambda run, key=None: layers and usual(run, key))

    return choose


@pytest.fixture(params=["one program", "layers"])
def each_way(request, run_by_layer):
    """A test with it runs both ways; the value is the way's name."""
    run_by_layer(request.param == "layers")
    return request.param


@pytest.fixture
def compiled_steps():
    """Gives a function that counts the programs compiled since the test began, for blocks and tokens of a stream."""
    programs = (driver.block_step, driver.token_step, steps.layer_step)
    before = sum(program._cache_size() for program in programs)
    return lambda: sum(program._cache_size() for program in programs) - before
