"""Parts of a text are grouped by what they are about, and a question finds its group."""

import pytest

import models

PARTS = ["The bakery sells rye bread.", "Rye bread and rolls.", "The ferry was late.", "A late ferry."]


@pytest.fixture(scope="module")
def retriever():
    return models.load("retriever")


def test_parts_of_one_topic_are_one_episode(retriever):
    found = models.episodes(*retriever, PARTS, 2)
    topics = [{models.episode_of(*retriever, found, part) for part in parts} for parts in (PARTS[:2], PARTS[2:])]
    assert sorted(topics, key=min) == [{0}, {1}]
    for number, episode in enumerate(found):
        assert models.episode_of(*retriever, found, episode.text) == number and episode.text in PARTS


def test_there_are_no_more_episodes_than_parts(retriever):
    assert [episode.text for episode in models.episodes(*retriever, PARTS[:1], 3)] == PARTS[:1]


@pytest.mark.parametrize(
    ("parts", "count", "message"),
    [
        ([], 2, "no part of a text was given"),
        (["a", ""], 2, "'' has no tokens"),
        (PARTS, 0, "give the number of episodes"),
    ],
)
def test_what_cannot_be_grouped_is_refused(retriever, parts, count, message):
    with pytest.raises(ValueError, match=message):
        models.episodes(*retriever, parts, count)
