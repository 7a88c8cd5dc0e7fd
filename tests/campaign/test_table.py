"""The table of cases: the library against the reference, and every pair of what a case may be."""

from __future__ import annotations

import dataclasses

import pytest

from tests.campaign import table
from tests.campaign.cases import Case
from tests.tiers import matrix, nightly

DEFAULT, IN_CI = 26, 40  # the first lines have most pairs for the seconds that they take: 80%, and 90%


def with_tiers():
    """Yield the cases. CI also runs each that is the first to have some name; nightly runs what has a pair or two."""
    had = set()
    for number, case in enumerate(table.table()):
        rest = matrix if number < IN_CI or table.names(case) - had else nightly
        had |= table.names(case)
        yield pytest.param(case, marks=() if number < DEFAULT else rest)


@pytest.mark.parametrize("case", list(with_tiers()), ids=lambda case: f"{case.policy}-{case.entry}")
def test_the_library_gives_what_the_reference_gives(case):
    outcome = table.ran(case)
    assert not outcome.fails, f"{outcome.kind}: {outcome.why}\npython -m tests.campaign --case '{case}'"


@matrix
def test_where_all_heads_of_a_layer_share_tokens_those_stay_that_all_have_marked():
    """In pages, whose heads are scored one at a time; a mark of one head once outweighed the mean."""
    sizes = dict(layers=2, kv_heads=2, group=3, width=30, windows=(None, 6), page_size=2, new=3, budget=9)
    case = Case(seed=1824698517, family="smollm3", rope="llama3", tokens="distinct", **sizes)
    assert table.ran(dataclasses.replace(case, policy="tova+critical+normalise")).kind == "ok"


def test_the_table_has_every_pair_and_every_name():
    has = set().union(*map(table.pairs, table.table()))
    drawn = set().union(*map(table.pairs, table.candidates(500)))
    assert drawn <= has, f"{sorted(drawn - has)[:5]}: make the table again with python -m tests.campaign.table"
    missing = {name for name in table.every_name() if (name,) not in has}
    assert not missing, f"no case has {sorted(missing)}: make the table again with python -m tests.campaign.table"
