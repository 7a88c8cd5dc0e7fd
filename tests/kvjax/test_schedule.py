"""What a schedule feeds, token by token, worked out by hand; whole runs by it: tests/models and tests/campaign."""

import numpy as np
import pytest

import kvjax
from kvjax._src.reconstruction import Reconstructed, Reconstruction, RepeatPrompt, unrepeated
from kvjax.schedule import Schedule, Text, answer_copies, copy_size, moments, repeats_of, schedule

NEVER = np.iinfo(np.int32).max
WORDS = RepeatPrompt((1,), (2, 3), (4,), overlap=5)
ROW = np.arange(10, 16, dtype=np.int32)


def fed(plan: Schedule) -> list[list[tuple]]:
    """What the first row is fed, in the context and behind it: tokens, the first one's position, part, evicts."""

    def of(phase, tokens, positions, part):
        at = np.flatnonzero(positions[0] >= 0)
        assert positions[0, at].tolist() == list(range(positions[0, at[0]], positions[0, at[0]] + len(at)))
        return (
            tokens[0, at].tolist(),
            int(positions[0, at[0]]),
            None if part is None else part[0].tolist(),
            phase.evicts,
        )

    return [[of(*step) for stage in stages for step in stage if (step[2][0] >= 0).any()] for stages in plan]


def test_a_part_is_asked_for_by_words_and_by_the_tokens_before_it():
    wanted = Reconstruction(chunk=4, prompt=WORDS)
    copies = repeats_of([ROW], np.array([6]), wanted, None)
    assert copy_size(wanted, 4) == 2 + 5 + 1 + 4  # before a later part, which has more words than the first
    first, second = [1, 4, 10, 11, 12, 13], [2, 3, 10, 11, 12, 13, 4, 14, 15]
    assert copies.tokens[:, 0].tolist() == [[0] * 6 + first, [0] * 3 + second]
    assert copies.positions[:, 0].tolist() == [[-1] * 6 + [*range(6, 12)], [-1] * 3 + [*range(6, 15)]]
    assert copies.parts[:, 0].tolist() == [[0, 4, 6], [4, 6, 6]]


def test_a_block_is_repeated_part_by_part_and_the_last_part_evicts():
    text = Text.of(np.stack([ROW, ROW]), lengths=np.array([6, 6]))
    one_fits = np.array([True, False]), np.zeros(2, bool)
    assert fed(schedule(text, kvjax.parse("kvzip(chunk=2)@uniform"), block=4, exact=True, overflows=one_fits)) == [
        [
            ([10, 11], 0, None, False),
            ([10, 11], 2, [0, 2, 2], True),
            ([12, 13, 14, 15], 2, None, False),
            ([10, 11, 12, 13], 6, [2, 4, 6], False),  # behind the tokens before the part, at most 8
            ([10, 11, 12, 13, 14, 15], 6, [4, 6, 6], True),
        ],
        [],
    ]


# A turn of four tokens and a question of two, behind ten tokens, of which the last two were not repeated yet.
LATER = Text(*map(np.array, ([[1, 2, 3, 4, 5, 6]], [6], [2], [10])), (np.array([8, 9], np.int32),))
QUESTION = ([5, 6], 14, None, False)


def test_after_a_later_turn_its_tokens_and_those_that_were_left_are_repeated():
    """At once, with a gradient for each part, or block by block."""
    again = [([8, 9, 1, 2], 14, [8, 12, 14], False), ([8, 9, 1, 2, 3, 4], 14, [12, 14, 14], True)]
    at_once = schedule(LATER, kvjax.parse("kvzip(chunk=4)@uniform"), block=8, when="prompt", exact=True)
    assert fed(at_once) == [[([1, 2, 3, 4], 10, None, False), *again], [QUESTION]]
    whole_parts = schedule(LATER, kvjax.parse("kvgrad(chunk=4)@uniform"), block=2, when="prompt", exact=True)
    assert fed(whole_parts) == [[([1, 2], 10, None, False), ([3, 4], 12, None, False), *again], [QUESTION]]
    by_block = schedule(LATER, kvjax.parse("kvzip(chunk=4)@uniform"), block=8, exact=True)
    assert fed(by_block) == [
        [([8, 9], 10, [8, 10, 10], True), ([1, 2, 3, 4], 10, None, False), ([1, 2, 3, 4], 14, [10, 14, 14], True)],
        [QUESTION],
    ]


def test_what_is_left_is_repeated_behind_the_question_where_only_the_answer_overflows():
    overflows = np.array([False]), np.array([True])
    plan = schedule(LATER, kvjax.parse("kvzip(chunk=4)@uniform"), block=8, exact=True, overflows=overflows)
    assert fed(plan) == [
        [([1, 2, 3, 4], 10, None, False)],
        [
            QUESTION,
            ([8, 9, 1, 2], 16, [8, 12, 16], False),
            ([8, 9, 1, 2, 3, 4, 5, 6], 16, [12, 16, 16], True),
        ],
    ]


def test_pseudo_tokens_see_all_that_came_before_and_their_policy_evicts_behind_an_overfull_question():
    plan = schedule(LATER, kvjax.parse("dapq(window=3)"), block=8, when="prompt", exact=True, overfull=True)
    context = [([1, 2, 3, 4], 10, None, False), ([2, 3, 4], 14, [0, 14, 14], True)]
    assert fed(plan) == [context, [(*QUESTION[:3], True)]]
    first = kvjax.parse("dapq(window=3,tokens='first')")
    assert fed(schedule(LATER, first, block=8, when="prompt", exact=True))[0][1] == ([1, 2, 3], 14, [0, 14, 14], True)


def test_a_later_turn_is_cut_by_its_longest_row():
    text = Text(np.arange(80).reshape(2, 40), np.array([3, 33]), np.zeros(2, int), np.array([10, 20]))
    for longest, size in ((33, 64), (32, 32), (8, 32)):
        ((stage,), _) = schedule(text._replace(lengths=np.array([3, longest])), kvjax.parse("h2o"), block=128)
        assert stage.steps[0].tokens.shape == (1, 2, size)


def test_a_copied_answer_is_the_part_before_its_end_and_an_idle_row_has_none():
    wanted = Reconstruction(chunk=4, prompt=WORDS)
    answer, end = np.array([[7, 8], [7, 8]]), np.array([12, 20])
    _, places, parts = answer_copies(wanted, answer, end, np.array([False, True]))
    assert places.tolist() == [[12, 13, 14, 15], [-1] * 4]
    assert parts.tolist() == [[10, 12, 12], [0, 0, NEVER]]


@pytest.mark.parametrize(("name", "every"), [("kvzip@uniform", 64), ("full", 0), ("dapq", 0)])
def test_decode_waits_as_long_as_a_repetition_takes(name, every):
    assert moments(kvjax._src.chains.policy_of(name), "block", None)[1] == every


@pytest.mark.parametrize("link", ["", "+normalise+caote", "+normalise+moments"])
@pytest.mark.parametrize(("score", "every"), [("rkv", 128), ("gate", 128), ("snapkv", 32), ("h2o", 1)])
def test_in_decode_a_score_sets_the_moments_of_its_chain(score, link, every):
    assert moments(kvjax.parse(score + link), "block", None) == ("block", every)


def test_unrepeated_tokens_are_in_the_order_of_the_text():
    """Slots hold them in any order; 0 is the score of a token that was not repeated, and -1 of a free slot's place."""
    position = np.array([[5, 2, -1, 3, 4], [0, 1, 2, -1, -1]])
    score = np.array([[0.0, 0.5, 0.0, 0.0, 0.2], [1.0, 1.0, 1.0, 0.0, 0.0]])
    rows = unrepeated(position, score, np.array([[50, 20, 99, 30, 40], [0, 10, 20, 99, 99]]))
    assert [row.tolist() for row in rows] == [[30, 40, 50], []]


def test_statistics_are_over_sinks_the_part_and_its_copies():
    part = Reconstructed(*map(np.array, ([4], [6], [9])), sinks=2)
    position = np.array([[0, 1, 2, 3, 4, 5, 6, 8, 9, 10, -1]])
    assert part.visible(position, np.array([0])).tolist() == [[0, 1, -1, -1, 4, 5, -1, -1, 9, 10, -1]]
