"""The table of cases: the library against the reference, and every pair of what a case may be."""

from __future__ import annotations

import pytest

from tests.campaign import table
from tests.tiers import first

DEFAULT = 36  # the first lines have most pairs: with these nine of ten


@pytest.mark.parametrize("case", first(DEFAULT, table.table()), ids=lambda case: f"{case.policy}-{case.entry}")
def test_the_library_gives_what_the_reference_gives(case):
    outcome = table.ran(case)
    assert not outcome.fails, f"{outcome.kind}: {outcome.why}\npython -m tests.campaign --case '{case}'"


def test_the_table_has_every_pair_and_every_name():
    has = set().union(*map(table.pairs, table.table()))
    drawn = set().union(*map(table.pairs, table.candidates(1500)))
    assert drawn <= has, f"{sorted(drawn - has)[:5]}: make the table again with python -m tests.campaign.table"
    missing = {name for name in table.every_name() if (name,) not in has}
    assert not missing, f"no case has {sorted(missing)}: make the table again with python -m tests.campaign.table"
