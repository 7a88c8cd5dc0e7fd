"""Registries: what is built in, what a program adds, and what installed packages offer, each under one name."""

import doctest
import inspect
import pydoc
import sys
from pathlib import Path

import pytest

import kvjax
import models
from kvjax import allocation, sources


def installed(folder: Path, package: str, code: str, **groups: str) -> None:
    """A package as pip leaves it in a folder: a module, and the metadata with its entry points."""
    (folder / f"{package}.py").write_text(code)
    metadata = folder / f"{package}-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
    lines = (f"[kvjax.{group}]\n{line}\n" for group, line in groups.items())
    (metadata / "entry_points.txt").write_text("".join(lines))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for file in tmp_path.glob("*.py"):
        sys.modules.pop(file.stem, None)


POLICY = """import jax.numpy as jnp
import kvjax
import models
from kvjax import allocation, sources

def {name}(*, power: float = 1.0):
    return kvjax.base_score("{name}", lambda o: jnp.sum(o.value**2, axis=-1)[:, :, None] ** power)
"""


def test_a_package_s_link_is_imported_when_its_name_is_asked_for_and_no_sooner(folder):
    installed(folder, "pkg_loud", POLICY.format(name="loud"), policies="loud = pkg_loud:loud")
    kvjax.parse("h2o+caote@layer")
    assert "pkg_loud" not in sys.modules
    policy = kvjax.parse("loud(power=2.0)+caote")
    assert "pkg_loud" in sys.modules
    assert str(policy) == "loud(power=2.0)+caote" and kvjax.parse("loud(power=2.0) + caote") is policy
    with pytest.raises(ValueError, match=r"loud: power is 'x'; expected finite float"):
        kvjax.parse("loud(power='x')")


def test_allocations_and_sources_have_groups_of_their_own(folder):
    code = """from kvjax.allocation import Allocation
from kvjax.sources import Source

def even():
    return Allocation("even", lambda c: c.live, scope="head", most=lambda L, K, budget: budget, even=True)

def newest():
    return Source("newest", lambda state, reading: reading.position[:, :, None, None] + 0.0)
"""
    installed(folder, "pkg_two", code, allocations="even = pkg_two:even", sources="newest = pkg_two:newest")
    assert str(kvjax.parse("tova@even")) == "tova@even"
    assert str(kvjax.parse_source("newest")) == "newest"
    with pytest.raises(ValueError, match="unknown policy 'newest'"):
        kvjax.parse("newest")


def test_a_package_that_cannot_be_imported_is_named_in_one_sentence(folder):
    installed(folder, "pkg_broken", "import no_such_module", policies="broken = pkg_broken:broken")
    said = (
        "the policy 'broken' is from pkg_broken 0.1, whose 'pkg_broken:broken' cannot be imported "
        r"\(ModuleNotFoundError: No module named 'no_such_module'\); update or uninstall that package."
    )
    with pytest.raises(ImportError, match=f"^{said}$"):
        kvjax.parse("broken")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("other = 3", "pkg_wrong 0.1 offers no policy: 'other' is 3; expected a function named other that makes a"),
        ("def right(): pass\nother = right", "expected a function named other"),
        ("def other(): return 3", "other returned 3; expected a Policy"),
    ],
)
def test_a_package_that_offers_something_else_is_refused(folder, code, said):
    installed(folder, "pkg_wrong", code, policies="other = pkg_wrong:other")
    with pytest.raises(ValueError, match=said):
        kvjax.parse("other")


def test_a_name_of_two_packages_is_refused_and_both_are_named(folder):
    for package in ("pkg_one", "pkg_other"):
        installed(folder, package, POLICY.format(name="same"), policies=f"same = {package}:same")
    with pytest.raises(ValueError, match=r"'same' is in pkg_o.* 0\.1 and in pkg_o.* 0\.1; rename it in one of them"):
        kvjax.parse("same")


def test_a_decorated_function_and_its_own_entry_point_are_one(folder):
    code = POLICY.format(name="both").replace("def both", "@kvjax.register\ndef both")
    installed(folder, "pkg_both", code, policies="both = pkg_both:both")
    policy = kvjax.parse("both")
    assert sys.modules["pkg_both"].both() is policy is kvjax.parse("both")


def test_a_link_of_a_package_s_module_is_the_package_s_own(folder):
    installed(folder, "pkg_deep", "", policies="deep = pkg_deep.links:deep")
    (folder / "pkg_deep.py").unlink()
    (folder / "pkg_deep").mkdir()
    (folder / "pkg_deep" / "__init__.py").write_text("")
    code = POLICY.format(name="deep").replace("def deep", "@kvjax.register\ndef deep")
    (folder / "pkg_deep" / "links.py").write_text(code)
    assert kvjax.parse("deep") is kvjax.parse("deep")  # the second time it was registered by its module
    for name in ("pkg_deep", "pkg_deep.links"):
        sys.modules.pop(name)


def test_a_program_may_register_a_name_again_but_not_take_another_module_s():
    def made(name: str, module: str):
        def make():
            return kvjax.Policy(name, kvjax.no_state, lambda scores, state, o: (scores, state), base=True)

        make.__name__, make.__module__ = name, module
        return make

    first = kvjax.register(made("mine", "cells"))()
    second = kvjax.register(made("mine", "cells"))()  # the cell was run again
    assert kvjax.parse("mine") is second is not first
    with pytest.raises(ValueError, match="'mine' is in cells and in elsewhere; rename it in one of them"):
        kvjax.register(made("mine", "elsewhere"))
    with pytest.raises(ValueError, match=r"'h2o' is in kvjax and in cells"):
        kvjax.register(made("h2o", "cells"))


def test_help_shows_the_arguments_of_every_public_function():
    public = {f"{m.__name__}.{name}": getattr(m, name) for m in (kvjax, models) for name in m.__all__}
    public |= {f"allocation.{name}": made for name, made in allocation.ALLOCATIONS.items()}
    public |= {f"sources.{name}": made for name, made in sources.SOURCES.items()}
    for name, shown in public.items():
        if not inspect.ismodule(shown) and callable(shown):
            text = pydoc.render_doc(shown, renderer=pydoc.plaintext)
            assert inspect.getdoc(shown) and "functools.partial(<" not in text, name
            if not isinstance(shown, type):
                short = name.rpartition(".")[2]
                assert text.splitlines()[2].startswith(f"{short}("), name
                assert " at 0x" not in str(inspect.signature(shown)), name
    assert list(inspect.signature(kvjax.snapkv).parameters) == ["window", "kernel", "pooling"]


def test_doctest_finds_the_examples_of_every_maker():
    for make in (kvjax.snapkv, kvjax.protect, allocation.adakv, sources.quest):
        found = doctest.DocTestFinder().find(sys.modules[make.__module__])
        assert any(test.examples and test.name.endswith(f".{make.__name__}") for test in found), make.__name__


def test_what_prints_in_a_notebook_is_short():
    given = [kvjax.Context(layer=2), allocation.adakv(cap=4.0), kvjax.parse("snapkv+caote"), sources.quest()]
    assert repr(given) == "[Context(layer=2), Allocation('adakv(cap=4.0)'), Policy('snapkv+caote'), Source('quest')]"
    assert repr(kvjax.Needs(rotary=True)) == "Needs(rotary=True)"
