"""Claims: contrasts that differ in one link, verdicts between floor and ceiling, equivalence, and their number."""

import numpy as np
import pytest

import kvjax
from evals import claims, report
from evals.claims import Claim, PolicyScores

PLACE = ("needle", 512, 0.25, "prompt", "known")
FULL = ("needle", 512, None, "block", "known")
rng = np.random.default_rng(0)


def found(policy, share, model="m", place=PLACE, of=200):
    """Outcomes of which the first ``share`` are right, in an order of their own per policy."""
    hits = np.random.default_rng(len(policy)).permutation(np.arange(of) < round(share * of))
    return PolicyScores(model, policy, place, {("needle", i): float(hit) for i, hit in enumerate(hits)})


def judged(one, other, expects="better", recency=0.2, full=0.9, **more):
    rows = [found("tova", one, **more), found("h2o", other, **more), found("recency", recency, **more)]
    claim = Claim("ours", "", "tova", "h2o", expects=expects)
    return claims.decide(claims.judge([claim], [*rows, found("full", full, place=FULL)], ["m"]))[0]


@pytest.mark.parametrize("policy", ["tova(heads='group')", "h2o@layer", "snapkv+positions"])
def test_a_claim_on_a_link_compares_a_policy_with_itself_and_that_link_alone(policy):
    (claim,) = claims.read([{"paper": "CAOTE", "link": "caote", "to": [policy]}])
    assert report.without_caote(claim.policy) == claim.over
    assert claim.policy != claim.over
    with pytest.raises(ValueError, match="has the link 'caote' already"):
        claims.read([{"paper": "CAOTE", "link": "caote", "to": [claim.policy]}])


@pytest.mark.parametrize(
    ("policy", "whole"),
    [
        ("h2o@layer", "h2o+caote@layer"),
        ("h2o@layer", "h2o+caote@layer"),
        ("snapkv+positions", "snapkv+caote+positions"),
        ("snapkv+pool+protect(sinks=4)+positions", "snapkv+pool+caote+protect(sinks=4)+positions"),
    ],
)
def test_a_link_is_added_behind_what_scores_and_before_what_protects_or_turns(policy, whole):
    (claim,) = claims.read([{"paper": "CAOTE", "link": "caote", "to": [policy]}])
    assert (claim.policy, claim.over) == (str(kvjax.parse(whole)), str(kvjax.parse(policy)))


@pytest.mark.parametrize(
    "one, other, expects, verdict",
    [
        (0.7, 0.4, "better", "holds"),
        (0.4, 0.7, "better", "does not"),
        (0.52, 0.5, "better", "not shown"),
        (0.2, 0.21, "better", "undecided"),  # both as recency
        (0.02, 0.12, "better", "undecided"),  # both below it
        (0.02, 0.12, "not worse", "undecided"),
        (0.9, 0.9, "better", "undecided"),  # both as the full cache
        (0.4, 0.7, "as good", "does not"),
        (0.55, 0.5, "as good", "not shown"),
        (0.4, 0.7, "not worse", "does not"),
        (0.7, 0.4, "not worse", "holds"),
        (0.7, 0.4, "as good", "does not"),
    ],
)
def test_a_verdict_needs_room_between_floor_and_ceiling(one, other, expects, verdict):
    row = judged(one, other, expects)
    assert row.verdict == verdict
    assert (row.floor, row.ceiling, row.samples) == (0.2, 0.9, 200)
    assert row.scores == pytest.approx((one, other)) and row.low <= row.difference <= row.high


def test_as_good_takes_more_than_no_difference():
    """A handful of equal samples shows no difference, and proves no equivalence; many do."""
    same = {("needle", i): float(i % 2) for i in range(400)}
    few = {key: value for key, value in same.items() if key[1] < 8}
    noisy = {key: float((key[1] // 2) % 2) for key in few}
    some = {key: value for key, value in same.items() if key[1] < 60}  # one in twenty might differ, and p = 0.95^60
    for one, other, verdict in ((same, same, "holds"), (few, noisy, "not shown"), (some, some, "not shown")):
        rows = [PolicyScores("m", "tova", PLACE, one), PolicyScores("m", "h2o", PLACE, other)]
        (row,) = claims.decide(claims.judge([Claim("ours", "", "tova", "h2o", expects="as good")], rows, ["m"]))
        assert row.verdict == verdict and (row.high < claims.MARGIN) == (verdict == "holds")


def test_a_claim_that_fails_in_another_setting_than_its_papers_is_called_another_task():
    rows = [found("tova", 0.4), found("h2o", 0.7)]
    one, other = (Claim("ours", "", *pair, elsewhere="LongBench") for pair in (("tova", "h2o"), ("h2o", "tova")))
    fails, holds = claims.decide(claims.judge([one, other], rows, ["m"]))
    assert (fails.verdict, fails.alone, holds.verdict) == ("another task", "does not", "holds")


@pytest.mark.parametrize("expects", ["as good", "not worse", "better"])
@pytest.mark.parametrize("models", [["a"], ["a", "b", "c"]])
def test_what_holds_lies_in_its_own_interval(expects, models):
    bounds = {"better": (0, 9), "as good": (-claims.MARGIN, claims.MARGIN), "not worse": (-claims.MARGIN, 9)}[expects]
    held = []
    for seed, shift in enumerate([-0.04, 0.0, 0.01, 0.06, 0.2]):
        draw = np.random.default_rng(seed)
        rows = [PolicyScores(m, "h2o", PLACE, {("needle", i): 0.4 for i in range(200)}) for m in models]
        for m in models:
            gains = 0.4 + shift + draw.normal(0, 0.01) + draw.choice([-0.1, 0, 0.1], size=200)
            rows.append(PolicyScores(m, "tova", PLACE, {("needle", i): gain for i, gain in enumerate(gains)}))
        (row,) = claims.decide(claims.judge([Claim("ours", "", "tova", "h2o", expects=expects)], rows, models))
        assert (row.alone == "holds") == (bounds[0] < row.low and row.high < bounds[1])
        if row.verdict == "holds":
            assert bounds[0] < row.low and row.high < bounds[1]
            held.append(shift)
    assert held


def test_a_paper_with_many_claims_needs_clearer_differences():
    wins = {("needle", i): float(i < 8) for i in range(50)}
    rows = [PolicyScores("m", "tova", PLACE, wins), PolicyScores("m", "h2o", PLACE, dict.fromkeys(wins, 0.0))]
    one = Claim("ours", "", "tova", "h2o")
    (judged,) = claims.judge([one], rows, ["m"])
    assert 0.05 / 5 < judged.p < 0.05 / 4 and judged.alone == "holds"
    alone, *others = ([row.verdict for row in claims.decide([judged] * count)] for count in (1, 4, 5))
    assert alone == ["holds"] and others == [["holds"] * 4, ["not shown"] * 5]
    assert claims.decide([judged] * 5)[0].corrected == pytest.approx(5 * judged.p)
    apart = judged._replace(claim=Claim("CAOTE", "", "tova", "h2o"))
    assert [row.corrected for row in claims.decide([judged, apart])] == [judged.p, judged.p]


def test_samples_are_averaged_over_budgets_and_judged_for_each_question():
    places = {
        (budget, question): ("needle", 512, budget, "prompt", question)
        for budget in (0.1, 0.5)
        for question in ("known", "unknown")
    }
    rows = [
        PolicyScores("m", policy, place, {("needle", i): float(policy == "tova" and budget == 0.1) for i in range(20)})
        for policy in ("tova", "h2o")
        for (budget, _), place in places.items()
    ]
    known, unknown = claims.judge([Claim("ours", "", "tova", "h2o")], rows, ["m"])
    assert known.where == {"question": "known", "when": "prompt"} and unknown.where["question"] == "unknown"
    assert (known.places, known.samples, known.difference) == (2, 20, 0.5)
    (half,) = claims.judge([Claim("ours", "", "tova", "h2o", at=(("budget", 0.5),), each=("when",))], rows, ["m"])
    assert (half.places, half.samples, half.difference) == (2, 20, 0.0)
    (more,) = claims.judge(
        [Claim("ours", "", "tova", "h2o", at=(("budget", 0.1),), over_at=(("budget", 0.5),), each=())], rows, ["m"]
    )
    assert (more.places, more.difference) == (2, 1.0)


def test_only_samples_that_both_policies_have_are_compared():
    """One that a run has left out moves no other."""
    scores = {("needle", i): float(i % 3 == 0) for i in range(40)}
    one, other = (PolicyScores("m", name, PLACE, dict(scores)) for name in ("tova", "h2o"))
    del one.scores["needle", 4], other.scores["needle", 9], other.scores["needle", 12]
    (row,) = claims.judge([Claim("ours", "", "tova", "h2o")], [one, other], ["m"])
    assert (row.samples, row.difference, row.scores) == (37, 0, (12 / 37, 12 / 37))
    apart = other._replace(scores={("needle", 99): 1.0})
    assert claims.judge([Claim("ours", "", "tova", "h2o")], [one, apart], ["m"]) == []


def test_a_claim_on_models_of_several_seeds_holds_if_it_does_on_each():
    def rows(**gains):
        return [
            PolicyScores(model, policy, PLACE, {("needle", i): gain * (policy == "tova") for i in range(100)})
            for model, gain in gains.items()
            for policy in ("tova", "h2o")
        ]

    claim, models = Claim("ours", "", "tova", "h2o"), ["a", "b", "c"]
    (one,) = claims.judge([claim], rows(b=0.5), ["b"])
    (each,) = claims.judge([claim], rows(a=0.4, b=0.5, c=0.6), models)
    (not_all,) = claims.judge([claim], rows(a=0.0, b=0.5, c=1.0), models)
    assert one.difference == not_all.difference == 0.5 and each.difference == pytest.approx(0.5)
    assert one.samples == each.samples == 100
    assert each.alone == "holds" and each.low < one.low < one.high < each.high
    assert not_all.alone == "not shown" and not_all.low < 0 and not_all.high == 1
    assert claims.judge([claim], rows(a=0.4, b=0.5, c=0.6)[:-2], models) == []


def test_a_claim_over_two_budgets_names_both():
    entry = dict(paper="ours", policies=["tova"], over=["h2o"], at={"budget": 0.125}, over_at={"budget": 256})
    assert [claim.text for claim in claims.read([entry])] == ["tova with 12.5% is better than h2o with 256 slots"]
