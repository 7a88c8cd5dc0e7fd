"""A slice of the campaign, the same cases every time, and what the campaign itself must not get wrong."""

import ast
import dataclasses
import itertools
import json
import operator
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import kvjax
from kvjax import allocation
from models import families
from models.folders import read_config
from tests.campaign import __main__ as campaign
from tests.campaign import checking, ways
from tests.campaign.cases import AT_ONCE, EIGHT_BITS, FAMILIES, LINK_NAMES, Case, draw, from_json, smaller
from tests.campaign.checking import Outcome
from tests.campaign.ways import check
from tests.models import reference
from tests.models.make_golden import GOLDEN, MODELS
from tests.models.reference import eight_bits, policies
from tests.models.reference.choices import Choices
from tests.models.reference.decoder import alike
from tests.tiers import first, nightly

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = 7  # about 30 seconds of a campaign


@pytest.mark.matrix
@pytest.mark.parametrize("number", first(1, range(PROGRAMS), rest=nightly))
def test_random_cases_are_those_of_the_reference(number):
    for case in itertools.islice(draw(0, number), 2):
        outcome = check(case)
        assert not outcome.fails, f"{outcome.kind}: {outcome.why}\npython -m tests.campaign --case '{case}'"


def test_every_score_link_and_allocation_is_drawn():
    policies = [next(draw(0, number)).policy for number in range(400)]
    assert "full" in policies
    policies = [policy for policy in policies if policy != "full"]
    drawn = {kvjax.parse(policy).allocation.name.split("(")[0] for policy in policies}
    assert drawn == set(allocation.ALLOCATIONS)
    links = {link.split("(")[0] for policy in policies for link in Case(policy=policy).links}
    assert links == LINK_NAMES


# Made of parts that others have, but for gpt-oss's sinks and gate, latent attention and layers without attention, which
# have tests of their own; all golden files are compared with transformers, policies in tests/models/test_sinks.py,
# test_latent.py and test_hybrid.py.
ALIKE = {
    "gemma", "olmo3", "ministral", "ministral3", "exaone4", "seed_oss", "gpt_oss", "deepseek_v2", "deepseek_v3",
    "glm4_moe_lite", "kimi_k2", "deepseek_v32", "glm_moe_dsa", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
    "granitemoe", "granitemoehybrid", "gemma3n_text", "gemma4_text", "gemma4_unified_text",
}  # fmt: skip


def test_every_family_is_drawn_as_what_it_is():
    assert set(FAMILIES) == set(families.FAMILIES) - ALIKE
    assert {next(draw(0, number)).family for number in range(200)} == set(FAMILIES)
    mixes = {case.dimensions()["dense"][0] for case in (next(draw(0, number)) for number in range(400))}
    assert mixes == {"none", "some", "all"}
    always = operator.attrgetter("activation", "norm_offset", "norms", "query_key_norm", "wide_query_key_norm")
    golden = [read_config(GOLDEN / name) for name in MODELS]
    assert {name: {always(config) for config in golden if config.architecture == name} for name in FAMILIES} == {
        name: {always(Case(family=name).config)} for name in FAMILIES
    }


def test_caches_in_eight_bits_are_drawn_and_change_nothing_else():
    dtypes = [next(draw(0, number)).cache_dtype for number in range(400)]
    assert set(dtypes) == {None, *EIGHT_BITS}
    assert 40 < sum(dtype is not None for dtype in dtypes) < 80
    for number in range(20):
        eight, floats = (next(draw(0, number, share)) for share in (1, 0))
        assert eight.cache_dtype in EIGHT_BITS and dataclasses.replace(eight, cache_dtype=None) == floats


def test_every_way_is_drawn_and_a_case_is_read_from_what_was_printed():
    cases = [case for number in range(100) for case in itertools.islice(ways.draw(0, number), 1)]
    assert {way for case in cases for way in case.dimensions()["way"]} == {"plain", *ways.WAYS}
    assert {case.way.endswith(AT_ONCE) for case in cases if case.way.startswith("turns")} == {True, False}
    assert all(from_json(str(case)) == case for case in cases)


def test_a_share_of_the_programs_of_a_way_have_a_policy_that_it_is_for():
    for name, way in ways.WAYS.items():
        if way.wanted is not None:
            drawn = [next(ways.draw(5, number, only=name), None) for number in range(80)]
            cases = [case for case in drawn if case is not None]
            wanted = [case for case in cases if way.wanted(case.policy)]
            least, most = ((way.share + shift) * len(cases) for shift in (-0.2, 0.3))
            assert least <= len(wanted) <= most and all(way.fits(case) for case in cases), name


WAYS = (  # in one program, of which few are made
    "in one program", "engine", "turns: turn, repeated", "match: turn", "rewind", "repetition", "scales: 1",
    "equal: heads", "dtypes: bfloat16",
)  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("way", WAYS)
def test_a_case_of_each_way_is_ok(way):
    policy = "rkv(window=2)" if way == "rewind" else "h2o"
    way = way if way == "in one program" else way + AT_ONCE
    outcome = check(Case(layers=2, lengths=(9, 5), width=9, new=2, way=way, entry="stream", policy=policy))
    assert outcome.kind in ("ok", "undecided"), outcome.why


def test_every_way_has_such_a_case_and_a_wrong_one_is_told(monkeypatch):
    assert {Case(way=way).dimensions()["way"][0] for way in WAYS} == set(ways.WAYS)
    monkeypatch.setattr(ways, "plain", lambda *given: 1 / 0)
    assert check(Case(way="in one program")).kind == check(Case(way="equal: keys")).kind == "raises"


def test_the_reference_shares_no_code_with_the_library():
    files = sorted((ROOT / "tests/models/reference").glob("*.py"))
    files = [file for file in files if file.name != "made.py"] + [ROOT / "tests/kvjax/contests.py"]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name.split(".")[0] not in ("jax", "kvjax", "models", "kernels_pallas"), f"{file}: {name}"


def test_the_smallest_failing_case_is_smaller_in_every_dimension_that_does_not_matter(monkeypatch):
    case = next(case for number in range(100) for case in draw(0, number) if case.layers == 3 and len(case.links) > 2)

    def fails_with_two_layers(case):
        return Outcome("differs" if case.layers >= 2 else "ok")

    monkeypatch.setattr(campaign, "check", fails_with_two_layers)
    smallest, _ = campaign.shrink(case, Outcome("differs"), seconds=60)
    least = dict(entry="prefill", lengths=(1,), width=1, new=1, block=1)
    assert smallest == Case(**least, layers=2, policy=smallest.policy, budget=smallest.budget)
    assert len(smallest.links) == 1 and smallest.allocation == "uniform"
    assert not list(smaller(dataclasses.replace(smallest, layers=1, policy="h2o", budget=1)))


def test_the_command_counts_and_ends_with_the_smallest_failing_case(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(campaign, "check", lambda case: Outcome("differs" if case.layers > 1 else "ok", "so it is"))
    assert campaign.main(["--cases", "40", "--seed", "0", "--json", str(tmp_path / "out.json")]) == 1
    report, printed = json.loads((tmp_path / "out.json").read_text()), capsys.readouterr().out
    assert sum(report["kinds"].values()) == report["cases"] == 40
    assert sum(sum(kinds.values()) for kinds in report["ways"].values()) == 40 and len(report["ways"]) > 1
    assert len(report["failures"]) == report["kinds"]["differs"] > 0
    assert printed.rstrip().endswith(f"python -m tests.campaign --case '{report['smallest']}'")
    assert from_json(report["smallest"]).layers == 2
    assert campaign.main(["--case", report["smallest"]]) == 1
    assert campaign.main(["--case", "{}"]) == 0


# --- what is a failure, and what is rounding --------------------------------------------------------------------------

CASE = Case(layers=2, kv_heads=2, group=2, lengths=(21, 12), width=21, policy="h2o", budget=6)


def with_held(field, change):
    """The library with other kept positions, or keys, in row 0 than it has."""
    library = checking._library

    def changed(case, weights):
        first, *others = library(case, weights)
        return [first._replace(held=first.held._replace(**{field: change(getattr(first.held, field).copy())})), *others]

    return changed


def test_one_token_more_less_or_another_is_a_failure(monkeypatch):
    assert check(CASE).kind == "ok"
    kept = checking._library(CASE, reference.parameters(CASE.config))[0].held.kept[1, 0]
    held, lost = np.argmax(kept), np.argmin(kept)
    for gone, come in ((held, None), (None, lost), (held, lost)):

        def change(kept, gone=gone, come=come):
            kept[1, 0, [p for p in (gone,) if p is not None]] = False
            kept[1, 0, [p for p in (come,) if p is not None]] = True
            return kept

        with monkeypatch.context() as patch:
            patch.setattr(checking, "_library", with_held("kept", change))
            outcome = check(CASE)
            assert outcome.kind == "differs" and outcome.why.startswith("row 0: [layer, head, position]")


def test_near_choices_are_turned_by_flips_and_by_what_is_held():
    scores, order = [3.0, 2.0 + 1e-6, 2.0, 1.0], [0, 1, 2, 3]
    plain, flipped = reference.Choices(), reference.Choices(frozenset({0}))
    assert plain.best(scores, order, 2) == [0, 1] and flipped.best(scores, order, 2) == [0, 2]
    assert [near.turned for near in plain.near + flipped.near] == [False, True]
    assert not flipped.near[0].tie
    held = reference.Choices()
    assert held.best(scores, order, 2, held=[False, False, True, False]) == [0, 2] and held.near[0].turned


def test_choices_far_apart_are_not_turned_by_what_is_held():
    choices = reference.Choices()
    assert choices.best([3.0, 2.1, 2.0, 1.0], [0, 1, 2, 3], 2, held=[False, False, True, True]) == [0, 1]
    assert not choices.near


def test_of_equals_the_more_recent_stays_even_if_rounding_tells_them_apart():
    scores, order = [0.5, 0.3 + 1e-16 * 2, 0.3, 0.3], [0, 1, 2, 3]
    choices = reference.Choices()
    assert sorted(choices.best(scores, order, 2)) == [0, 3]
    turned = reference.Choices()
    assert sorted(turned.best(scores, order, 2, held=[True, True, False, False])) == [0, 1]
    assert turned.near[0].turned and turned.near[0].tie


def test_equals_of_two_heads_are_near_and_of_one_head_the_more_recent_stays():
    """Each head's mean of all its weights is the same number, but not the same sum."""
    scores, order, heads = [1.0] * 4, [1, 1, 0, 0], [0, 1, 0, 1]

    def turned(held, number=2, scores=scores):
        choices = Choices()
        best = choices.best(scores, order, number, group=heads, held=[at in held for at in range(4)])
        assert sorted(best) == sorted(held)
        return [(near.turned, near.tie) for near in choices.near]

    assert turned([0, 1]) == [(False, False)] and turned([0, 2]) == [(True, False)]
    assert turned([2, 1]) == [(True, True)]  # the older one of head 0
    assert turned([0, 2], scores=[0.0] * 4) == [(True, True)]  # zeros are no sums
    near = Choices()
    assert near.best(scores, order, 1, group=heads) == [0] and not near.near[0].turned
    assert Choices(frozenset({0})).best(scores, order, 1, group=heads) == [1]


def test_tokens_with_the_same_key_are_alike_unless_it_is_zero_or_one_of_them_has_left():
    key, kept = np.array([[[1.0], [1.0 + 1e-15], [2.0], [2.0], [0.0], [0.0]]]), np.ones((1, 6), bool)
    kept[0, 3] = False
    assert alike(key, kept).tolist() == [[True, True, False, False, False, False]]


def test_a_choice_among_scores_that_are_nothing_but_rounding_is_wide():
    choices = reference.Choices()
    assert choices.best([1e-9, 2e-9, 3e-9, 0.5], [0, 1, 2, 3], 2, noise=[1e-6] * 4, held=[True, *[False] * 3]) == [3, 0]
    assert choices.near[0].wide and not choices.near[0].tie


# --- rows of eight bits -----------------------------------------------------------------------------------------------


def rounded(rows, dtype, choices=None, known=None):
    rows = np.array(rows)
    known = np.full(rows.shape, np.nan) if known is None else np.array(known)
    return eight_bits.rounded(rows, dtype, choices or reference.Choices(), known)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_rows_are_rounded_as_the_library_rounds_them(dtype):
    rows = np.random.default_rng(0).normal(size=(3, 50, 8)).astype(np.float32)
    rows[0, 0] = 0
    values, scale = jax.jit(kvjax.quantise, static_argnums=1)(rows, dtype)
    wanted = np.asarray(values).astype(np.float64) * np.asarray(scale, np.float64)[..., None]
    near = reference.Choices()
    np.testing.assert_allclose(rounded(rows.astype(np.float64), dtype, near), wanted, rtol=1e-6)
    assert len(near.near) < 5 and not any(x.turned for x in near.near)
    assert rounded(rows, "float32") is not None and (rounded(rows, "float32") == rows).all()


def test_a_number_half_way_falls_where_it_is_known_or_flipped_and_equal_rows_fall_alike():
    row, below, above = [127.0, 2.5 - 1e-6], [[127, 2], [127, 2]], [[127, 3], [127, 3]]
    plain, flipped, held = reference.Choices(), reference.Choices(frozenset({0})), reference.Choices()
    assert rounded([row, row], "int8", plain).tolist() == below
    assert [near.turned for near in plain.near] == [False]
    assert rounded([row, row], "int8", flipped).tolist() == above
    assert rounded([row, row], "int8", held, known=above).tolist() == above
    assert [near.turned for near in held.near] == [True, True] and not held.near[0].tie
    far = reference.Choices()
    assert rounded([[127.0, 2.4]], "int8", far, known=[[127, 3]]).tolist() == [[127, 2]] and not far.near


def test_a_row_one_step_off_is_a_failure_and_so_is_a_cache_that_does_not_round(monkeypatch):
    eight = dataclasses.replace(CASE, cache_dtype="int8")
    assert check(eight).kind == "ok"
    key = checking._library(eight, reference.parameters(eight.config))[0].held.key
    step = np.abs(key).max(axis=-1, keepdims=True) / 127
    one = np.zeros(key.shape)
    one[1, 0, np.argmax(key[1, 0, :, 0] != 0), 0] = 1

    with monkeypatch.context() as patch:
        patch.setattr(checking, "_library", with_held("key", lambda key: key + one * step))
        outcome = check(eight)
        assert outcome.kind == "differs" and outcome.why.startswith("row 0: keys off by")
    library = checking._library
    monkeypatch.setattr(checking, "_library", lambda case, weights: library(CASE, weights))
    assert check(eight).kind == "differs"


def test_equal_scores_of_kvzip_are_a_near_choice():
    """Behind a sliding window equal tokens score equally, except for float32's rounding."""
    choices, kept = Choices(), np.ones((1, 4), bool)
    recited = np.array([[0.3, 0.15835528, 0.15835528, 0.1]])
    seen = SimpleNamespace(recited=recited, kept=kept, noise=np.zeros((1, 4)), choices=Choices())
    scores = policies.LINKS["kvzip"]().score(None, seen)[0, 0]
    assert choices.best(scores, range(4), 2, noise=seen.noise[0]) == [0, 2]
    assert [near.number for near in choices.near] == [0]
