"""The co-reference task: its pools, what a sample is made of, and that tests share nothing with training."""

import pytest

from papers.predictor import coref_task

TRAIN, TEST = coref_task.pools("train"), coref_task.pools("test")


@pytest.mark.parametrize("pool", coref_task.Pools._fields)
def test_a_pool_has_a_hundred_entries_and_both_splits_none_in_common(pool):
    train, test = getattr(TRAIN, pool), getattr(TEST, pool)
    assert len(set(train) | set(test)) == len(train) + len(test) >= 100
    assert len(test) >= 40


def test_names_take_several_tokens(tokenizer):
    sizes = [len(tokenizer.encode(f" {name}", add_special_tokens=False).ids) for name in TRAIN.names + TEST.names]
    assert min(sizes) >= 2


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_sample_is_the_papers_template(tokenizer, split):
    pools = coref_task.pools(split)
    sample = coref_task.sample(3, tokenizer, split)
    introduction, tie_back = next(place for place in pools.places if sample.prompt.startswith(place[0]))
    distractions = sample.prompt.removeprefix(f"{introduction} {sample.name}. ").removesuffix(f" {tie_back}:")
    reflection = next(text for text in pools.reflections if distractions.startswith(text))
    dish = next(text for text in pools.dishes if f" {text} " in distractions)
    problem = next(text for text in pools.problems if distractions.endswith(text))
    assert distractions == f"{reflection} {dish} {problem}"
    assert sample.name in pools.names


def test_tokens_name_the_place_twice(tokenizer):
    for seed in range(30):
        sample = coref_task.sample(seed, tokenizer)
        assert sample.tokens == tokenizer.encode(sample.prompt).ids
        assert sample.prompt.count(sample.name) == 1
        assert tokenizer.encode(f"{sample.prompt} {sample.name}").ids == sample.tokens + sample.answer_tokens
        stated = sample.tokens[sample.stated_at :][: len(sample.answer_tokens)]
        assert stated == sample.answer_tokens and tokenizer.decode(stated) == f" {sample.name}"
        assert tokenizer.decode(sample.tokens[: sample.context_end])[-1] == "."
        assert sample.name in tokenizer.decode(sample.tokens[: sample.context_end])
        assert 140 <= len(sample.prompt.split()) <= 220


def test_same_seed_same_sample(tokenizer):
    samples = [coref_task.sample(seed, tokenizer) for seed in range(100)]
    assert samples[7] == coref_task.sample(7, tokenizer)
    assert len({sample.prompt for sample in samples}) == 100
    assert len({sample.name for sample in samples}) > 30
