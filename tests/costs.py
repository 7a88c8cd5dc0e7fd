"""What a test run costs: programs that XLA is asked for, the dearest tests, and the limit of the default tier."""

import heapq
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.monitoring
import pytest

MOST_PROGRAMS = 3_500  # that the default tier may ask for, by both workers together
DEAREST = 20
ASKED = "/jax/compilation_cache/compile_requests_use_cache"

_asked = 0
_looked = 0  # programs that had been asked for when the memory maps were last counted


def _count(event: str, **_: Any) -> None:
    global _asked
    _asked += event == ASKED


jax.monitoring.register_event_listener(_count)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note the CPU seconds, those of helper processes included, and the programs of a test with its fixtures."""
    start, asked = _seconds(), _asked
    result = yield
    by_default = not any(item.iter_markers("matrix")) and not any(item.iter_markers("nightly"))
    item.config.stash[_COSTS].append((round(_seconds() - start, 3), _asked - asked, item.nodeid, by_default))
    _drop_programs()
    return result


def _drop_programs() -> None:
    """Drop compiled programs where there are many; else they stay, for the next tests that ask for them."""
    global _looked
    if _asked - _looked > 100:
        _looked = _asked
        from models.commands.programs import make_room  # here: conftest.py sets how jaxtyping treats the packages

        make_room()


_COSTS = pytest.StashKey[list[tuple[float, int, str, bool]]]()


def _seconds() -> float:
    return time.process_time() + sum(os.times()[2:4])


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_COSTS] = []
    config.pluginmanager.register(_OfWorkers(), "costs of workers") if config.pluginmanager.hasplugin("xdist") else None


class _OfWorkers:
    """What pytest-xdist's workers hand to the process that started them."""

    def pytest_testnodedown(self, node: Any) -> None:
        node.config.stash[_COSTS] += getattr(node, "workeroutput", {}).get("costs", [])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    costs = session.config.stash[_COSTS]
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["costs"] = costs
    elif _too_many(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _too_many(config: pytest.Config) -> bool:
    """Say whether the whole default tier, alone or with the matrix, asked for more programs than it may."""
    everything = config.args_source == pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    return (
        os.environ.get("KVJAX_TIER") in ("default", "both")
        and everything
        and sum(programs for _, programs, _, by_default in config.stash[_COSTS] if by_default) > MOST_PROGRAMS
    )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    costs = config.stash[_COSTS]
    programs, seconds = sum(cost[1] for cost in costs), sum(cost[0] for cost in costs)
    terminalreporter.write_line(f"{programs} programs asked for, {seconds:.0f} CPU seconds")
    if path := os.environ.get("KVJAX_COSTS"):  # a file of all of them, for whoever wants to know more
        Path(path).write_text("".join(json.dumps(cost) + "\n" for cost in costs))
    if os.environ.get("KVJAX_TIER"):
        terminalreporter.section(f"the {DEAREST} dearest tests: CPU seconds, programs")
        for cost in heapq.nlargest(DEAREST, costs):
            terminalreporter.write_line("{:7.1f} {:5d}  {}".format(*cost[:3]))
    if _too_many(config):
        terminalreporter.write_line(
            f"The default tier asks for more than {MOST_PROGRAMS} of these programs: use sizes that other tests use, "
            "look at results in NumPy, or mark what is a product of options with pytest.mark.matrix.",
            red=True,
        )
