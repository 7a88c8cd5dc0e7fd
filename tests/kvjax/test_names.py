"""Test what names stand for: a paper's method, its parts, and what kvjax wrote before."""

import itertools
import re
import tomllib
import warnings
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import kvjax
from kvjax._src import former_names
from kvjax._src.chains import LINKS
from kvjax._src.former_names import renamed, renamed_document
from kvjax.allocation import ALLOCATIONS
from tests.kvjax import blocks

DOCS = Path(__file__).parents[2] / "docs"
BASES = sorted(name for name, make in LINKS.items() if make().base and make.__module__.startswith("kvjax."))
EVEN = sorted(name for name in ALLOCATIONS if name not in ("headkv", "lukv", "duo"))  # which read files
PUBLISHED = {
    **dict.fromkeys(("kvzip", "kvgrad", "zap", "gate"), "model(normalise=False)"),
    "laprox": "model", "cake": "cake", "lava": "lava", "criticalkv": "adakv", "adakv": "adakv", "momentkv": "adakv",
    "defensivekv": "layer", "prompted": "layer(cap=None)",
    "pyramidkv": "pyramid", "d2o": "d2o", "simlayerkv": "simlayer", "repeat": "model(normalise=False,cap=8)",
}  # fmt: skip


@pytest.mark.parametrize("name", BASES)
def test_a_name_stands_for_one_policy_and_names_no_allocation_that_is_its_own(name):
    policy, own = kvjax.parse(name), PUBLISHED.get(name, "uniform")
    assert policy.allocation.name == own and kvjax.parse(f"{name}@{own}") is policy is kvjax.parse(str(policy))
    for link, other in itertools.product(("", "+protect(sinks=2)"), EVEN):
        try:
            changed = kvjax.parse(f"{name}{link}@{other}")
        except ValueError as error:  # scores that may be negative, or heads that share one set of tokens
            assert re.search(
                "put 'normalise' between|take heads='group'|attention that .* lacks|windows of", str(error)
            )
            continue
        assert kvjax.parse(str(changed)) is changed
        assert changed.allocation.name == other and ("@" in str(changed)) == (other != own)
        assert changed @ own == kvjax.parse(f"{name}{link}")


def test_a_chain_has_the_allocation_of_its_base_score_until_another_is_given():
    chain = kvjax.chain(kvjax.kvzip(), kvjax.caote())
    assert str(chain) == "kvzip+caote" and chain.allocation is kvjax.kvzip().allocation
    assert str(chain @ "uniform") == "kvzip+caote@uniform" == str(kvjax.chain(kvjax.kvzip() @ "uniform", kvjax.caote()))
    assert str(kvjax.chain(chain @ "adakv", kvjax.protect(sinks=2))) == "kvzip+caote+protect(sinks=2)@adakv"
    assert kvjax.chain(chain, kvjax.protect(sinks=2)) is kvjax.parse("kvzip+caote+protect(sinks=2)")
    with_measures, without = kvjax.parse("cake"), kvjax.parse("cake@uniform")
    assert with_measures.reads.statistics - without.reads.statistics == {"window_log"}


@pytest.mark.parametrize(
    ("name", "sinks", "recent"),
    [
        ("h2o", 0, 32),
        ("h2o+protect(recent=0)", 0, 0),
        ("h2o+protect(sinks=4)", 4, 32),
        ("kvzip+protect(recent=8)", 4, 8),
        ("snapkv(window=16)+protect(sinks=1,recent=0.5)+caote+protect(sinks=0)", 0, 32),
        ("sage+protect(recent=0)", 16, 0),
        ("gate", 4, 1),
    ],
)
def test_a_number_replaces_what_the_links_before_protect_and_none_leaves_it(name, sinks, recent):
    assert kvjax.protected(name, 64) == (sinks, recent)


def test_some_of_the_newest_stay_where_a_share_of_the_budget_has_none():
    sage = kvjax.parse("sage")
    assert [sage.protected(budget) for budget in (1, 3, 8)] == [(0, 1), (0, 1), (2, 2)]
    np.testing.assert_array_equal(jax.jit(sage.protected)(np.array([1, 8])), [[0, 2], [1, 2]])


PARTS = {
    "pyramidkv(window=2,beta=4)": "snapkv(window=2)@pyramid(beta=4)",
    "adakv(window=2,kernel=3,safeguard=0.5)": "snapkv(window=2,kernel=3)@adakv(safeguard=0.5)",
    "criticalkv(window=2,kernel=3)+caote": "snapkv(window=2,kernel=3)+critical+caote@adakv",
    "defensivekv(window=2,kernel=3,safe=0.25)": "defensive(window=2,kernel=3)+critical(safe=0.25)@layer",
    "chunkkv(window=2,kernel=3,size=2)": "snapkv(window=2,kernel=3)+chunks(size=2)",
    "d2o(similarity=0.5)": "h2o+merge(similarity=0.5)@d2o",
    "simlayerkv(window=2,recent=0.5)@uniform": "snapkv(window=2)",
    "window": "snapkv(kernel=7)+chunks",
    "repeat": "kvzip@model(normalise=False,cap=8)",
    "gate+caote": "zap+protect(sinks=4,recent=0.02)+caote",
}


@pytest.mark.parametrize(("name", "written_out"), PARTS.items(), ids=PARTS)
def test_a_method_is_what_its_parts_are_under_a_name_of_its_own(name, written_out):
    method, parts = kvjax.parse(name), kvjax.parse(written_out)
    assert str(method) == name
    for what in ("allocation", "reads", "merging", "heads", "positions", "nonnegative", "cumulative"):
        assert getattr(method, what) == getattr(parts, what)
    assert method.protected(100) == parts.protected(100)
    sizes = blocks.B, blocks.K, blocks.G, blocks.S, blocks.D
    of = [[x.shape for x in jax.tree.leaves(jax.eval_shape(lambda p=p: p.state(*sizes)))] for p in (method, parts)]
    assert of[0] == of[1]


@pytest.mark.parametrize("name", ["criticalkv(window=2,kernel=3)+caote", "chunkkv(window=2,kernel=3,size=2)"])
def test_a_method_keeps_what_its_parts_keep(name):
    block = blocks.make(0)
    np.testing.assert_array_equal(blocks.scores(name, block), blocks.scores(PARTS[name], block))


def test_the_name_of_a_tuned_kernel_is_read_and_warns_once():
    former_names._warn.cache_clear()
    with pytest.warns(DeprecationWarning, match=r"'snapkv_tuned' is now written snapkv\(kernel=13\)"):
        assert str(kvjax.parse("snapkv_tuned(window=8)+caote@adakv")) == "snapkv(window=8,kernel=13)+caote@adakv"
    with warnings.catch_warnings(action="error"):
        assert kvjax.parse("snapkv_tuned") is kvjax.parse("snapkv(kernel=13)") is kvjax.parse("snapkv_tuned()")


# --- names that kvjax wrote before 0.3.0 ------------------------------------------------------------------------------

FORMER_LAPROX = "laprox(gqa='group',pooled='product')"
FORMER = {
    "kvzip": "kvzip@uniform",
    "kvzip@model(normalise=False)": "kvzip",
    "kvzip(visible='cache')+caote(per='query')@model(normalise=False)": "kvzip(visible='cache')+caote(per='query')",
    "kvzip@model(normalise=False,cap=8.0)": "kvzip@model(normalise=False,cap=8.0)",
    "h2o": "h2o+protect(recent=0)",
    "h2o+caote@layer": "h2o+caote+protect(recent=0)@layer",
    "h2o+protect(recent=0.5)": "h2o",
    "h2o(accumulate=False)+caote(group='mean')+protect(recent=0.5)": "h2o(accumulate=False)+caote(group='mean')",
    "h2o+protect(sinks=4,recent=0.5)+caote": "h2o+protect(sinks=4)+caote",
    "zap+protect(sinks=4,recent=0.02)@model(normalise=False)": "gate",
    "zap+protect(sinks=4,recent=0.5)": "zap+protect(sinks=4,recent=0.5)@uniform",
    "kvzip+protect(sinks=4,recent=0.5)@model(normalise=False)": "kvzip+protect(recent=0.5)",
    "laprox(kernel=13)@model": "laprox(kernel=13,gqa='group',pooled='product')",
    "laprox(target='attention')@model": "laprox(target='attention')",
    "laprox(gqa='joint')": "laprox(pooled='product')@uniform",
    "laprox(gqa='joint',pooled='attention')@model": "laprox",
    "laprox@model(cap=8.0)": "laprox(gqa='group',pooled='product')@model(cap=8.0)",
    "cake@cake": "cake",
    "cake@cake(window=16)": "cake@cake(window=16)",
    "lava(window=8)@lava": "lava(window=8)",
    "snapkv_tuned+caote": "snapkv(kernel=13)+caote",
    "snapkv+protect(sinks=0.1,recent=0.1)": "snapkv+protect(sinks=0.1)",  # a tenth of 256 is less than the window
    "snapkv+critical@adakv": "snapkv+critical@adakv",
    "q_filters(file='a@b+c.npy',content='0f')@headkv(file='h.npy')":
        "q_filters(file='a@b+c.npy',content='0f')@headkv(file='h.npy')",
    "full": "full", "oracle": "oracle", "reads quest": "reads quest",
}  # fmt: skip


@pytest.mark.parametrize(("name", "today"), FORMER.items(), ids=FORMER)
def test_a_former_name_is_translated(name, today):
    assert renamed(name) == today


former_links = st.sampled_from(
    ["caote", "pool", "protect(sinks=1)", "protect(recent=3)", "protect(sinks=5,recent=40)", "protect(recent=0.5)"]
)
FORMERLY_PROTECTED = {"h2o": (0, 0), "tova": (0, 0), "snapkv(window=4)": (0, 4), "kvzip": (4, 0), "zap": (0, 0),
                      "laprox(window=4)": (0, 4), "cake(window=4)": (0, 4), "lava": (0, 32), "sage": (64, 64),
                      "lagkv(lag=8)": (4, 8)}  # fmt: skip


@hypothesis.given(
    st.sampled_from(list(FORMERLY_PROTECTED)), st.lists(former_links, max_size=3, unique=True),
    st.sampled_from(["", "@uniform", "@pyramid", "@model(normalise=False)", "@model", "@cake", "@lava"]),
)  # fmt: skip
def test_a_former_name_and_its_translation_keep_the_same(base, links, allocation):
    if base == "tova":
        allocation = ""
    policy = kvjax.parse(renamed("+".join([base, *links]) + allocation))
    assert policy.allocation.name == {"": "uniform"}.get(allocation, allocation.removeprefix("@"))
    each = [FORMERLY_PROTECTED[base]]
    each += [kvjax.protected(f"random+{link}", 256) for link in links if link.startswith("protect")]
    assert policy.protected(256) == tuple(map(max, zip(*each, strict=True)))
    if str(policy) != "gate":
        chain = [link.name for link in policy.links or (policy,) if not link.name.startswith("protect")]
        assert [name.split("@")[0] for name in chain] == [base, *(x for x in links if not x.startswith("protect"))]


def test_a_document_s_names_are_translated_where_a_former_kvjax_wrote_it():
    content = {
        "policies": "full,h2o,butler(group='max'),kvzip@model(normalise=False)",
        "results": [{"policy": "laprox@model", "over": ["kvzip"], "task": "cake", "answers": {"kvzip": [1]}}],
        "claim": "h2o+caote+protect(recent=0.5) has a smaller error than h2o+protect(recent=0.5), by block (zap)",
    }
    today = {
        "policies": "full,h2o+protect(recent=0),butler(group='max'),kvzip",
        "results": [
            {"policy": FORMER_LAPROX, "over": ["kvzip@uniform"], "task": "cake", "answers": {"kvzip@uniform": [1]}}
        ],
        "claim": "h2o+caote has a smaller error than h2o, by block (zap)",
    }
    for version in ("0.1.0", "0.2.0", "not installed"):
        made = {"environments": [{"versions": {"kvjax": version}}]}
        assert renamed_document(made | content) == made | today
    for made in ({"versions": {"kvjax": "0.3.0"}}, {}):
        assert renamed_document(made | content) == made | content


def test_every_name_in_the_tables_of_the_docs_is_one():
    methods, presses = (tomllib.loads((DOCS / f"{name}.toml").read_text()) for name in ("methods", "kvpress"))
    names = [entry["run"] for kind in methods.values() for entry in kind if "run" in entry]
    names += [entry["here"].strip("`") for kind in presses.values() for entry in kind if "here" in entry]
    for name in names:
        if not re.search(r"^\.\.\.|file=|=n\b|kvjax\.|models\.|when=|evict_every=", name):
            policy = kvjax.parse(name)
            assert kvjax.parse(str(policy)) is policy
