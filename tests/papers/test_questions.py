"""Questions about long texts: rows that fit, whose answer is in the text, in sentences that no evaluation uses."""

import itertools
import json
import re

import numpy as np
import pytest

import models
from evals import generation, prose, ruler_tasks, tasks
from evals import questions as free
from papers.__main__ import main
from papers.answers import questions
from train import answers

LENGTH = 420
TEXT = "In the beginning the earth was without form and void, and darkness was upon the deep. " * 2


@pytest.fixture(scope="module")
def tokenizer():
    return models.load("retriever")[1]


@pytest.fixture(scope="module")
def rows(tokenizer):
    return [questions.row(0, number, tokenizer, LENGTH) for number in range(90)]


def turns(row):
    """The questions of a row, and their answers."""
    return [(row.prompt, row.answer), *row.more]


def test_rows_fit_and_hold_their_answers(rows, tokenizer):
    assert {row.family for row in rows} == set(questions.FAMILIES)
    assert max(len(row.more) for row in rows) == LENGTH // questions.TOKENS - 1
    for row in rows:
        rest = [tokenizer.encode(text, add_special_tokens=False) for turn in turns(row) for text in turn][1:]
        assert 300 < len(tokenizer.encode(row.prompt)) + sum(map(len, rest)) + 1 <= LENGTH
        for prompt, answer in turns(row):
            assert answer.startswith(" ")
            context = row.prompt.rpartition("How many" if row.family == "counts" else "\n")[0]
            if row.family == "counts":
                assert questions.COUNTS[context.count(prompt.rsplit('"', 2)[1])] == answer[1:]
            elif row.family != "told":
                assert answer[1:] in context


def test_a_chain_leads_to_its_answer(rows):
    for row in (row for row in rows if row.family == "chains"):
        set_to = dict(line.split(" be ") for line in questions.re.findall(r"Let (\w+ be \w+)\.", row.prompt))
        for prompt, answer in turns(row):
            name = prompt.split()[-2]
            while name in set_to:
                name = set_to[name]
            assert f" {name}" == answer


def test_a_row_follows_from_seed_and_number_alone(rows, tokenizer):
    assert questions.row(0, 7, tokenizer, LENGTH) == rows[7] != questions.row(1, 7, tokenizer, LENGTH)


def test_no_sentence_of_an_evaluation_is_learned(rows):
    texts = "".join(row.prompt for row in rows)
    assert not [sentence for sentence in prose.sentences("test") if sentence in texts]
    assert [sentence for sentence in prose.sentences("train") if sentence in texts]


def masked(text):
    """The sentences and lines of a text without numbers, keys and attributes: the wordings."""
    keys = {*prose.ADJECTIVES, *prose.NOUNS, *questions.ADJECTIVES, *questions.NOUNS}
    names = {*prose.ATTRIBUTES, *questions.ATTRIBUTES, "uuid", "uuids", "number", "numbers"}
    words = {**dict.fromkeys(keys, "K"), **dict.fromkeys(names, "A")}
    parts = re.split(r"\n|(?<=[.?!]) ", re.sub(r"[\d-]+", "0", text))
    each = (re.sub(r"[a-z]+", lambda found: words.get(found.group(), found.group()), part.lower()) for part in parts)
    return {re.sub(r"\bK( K)*\b", "K", part) for part in each if part.strip()}


def wordings_of_evaluations(tokenizer):
    """The wordings of prompts that evaluations make of facts: needles, generations, RULER; without their filler."""
    texts = [sample.prompt for seed in range(40) for sample in tasks.needles(seed, tokenizer, 400, asked=10)]
    texts += [sample.prompt for seed in range(5) for sample in generation.draw(seed, tokenizer, 600, 5)]
    rng = np.random.default_rng(0)
    drafts = [ruler_tasks.builder(task, 0, 1024, ruler_tasks.Sources(), 0)[0](40) for task in ruler_tasks.TASKS[:-2]]
    texts += [part for draft in drafts for part in (draft.context, draft.question, draft.answer)]
    texts += [tasks.cue(tasks.random_fact(rng))]
    filler = masked(" ".join(prose.sentences("test") + prose.sentences("train")))
    return set().union(*map(masked, texts)) - filler


def unnamed(text):
    """A template without its names and articles."""
    return re.sub(r"\b(the|a|an) ", "", re.sub(r"\{\w+\}", "_", text.lower()))


def test_no_key_attribute_or_wording_of_an_evaluation_is_learned(tokenizer):
    assert not {*questions.ADJECTIVES, *questions.NOUNS, *questions.ATTRIBUTES} & {
        *prose.ADJECTIVES, *prose.NOUNS, *prose.ATTRIBUTES
    }  # fmt: skip
    drafts = [make(np.random.default_rng(seed)) for make, _ in questions.FAMILIES.values() for seed in range(100)]
    made = masked("\n".join(text for hidden, asked in drafts for text in (*hidden, *itertools.chain(*asked))))
    judged = wordings_of_evaluations(tokenizer)
    texts = [text for form in free.FORMS.values() for part in form.values() if isinstance(part, list) for text in part]
    fields = [
        form[name]
        for form in questions.CONTENT["told"]
        for name in ("stated", "later", "asked", "answer")
        if name in form
    ]
    own = [text for field in [*fields, questions.CONTENT["absent"]["asked"]] for text in np.atleast_1d(field)]
    assert not {*map(unnamed, texts)} & {*map(unnamed, own)}
    names = {word for name in ("person", "town") for word in re.findall(r"\w+", " ".join(free.WORDS[name]))}
    assert not names & {word for name in ("first", "last", "town") for word in questions.WORDS[name]}
    assert {"the A of K is 0.", "question: what is the A of K?", "answer: the A of K is"} <= judged
    assert made & judged <= {"0."}  # a number alone, in an answer


def words(text):
    return re.findall(r"\w+", text.lower())


def test_what_is_told_is_asked_in_turns_of_a_chat(tokenizer):
    form = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}<end>{% endif %}{% endfor %}"
    )
    form += "{% if add_generation_prompt %}<assistant>{% endif %}"
    chats = models.Tokenizer(tokenizer.backend, special_tokens={"eos_token": "<end>"}, chat_template=form)
    row = next(row for row in (questions.row(0, n, chats, LENGTH) for n in range(40)) if row.family == "told")
    text, _, asked = row.prompt.removeprefix("<user>").rpartition("\n\n")
    assert re.search(r"[?.]<assistant>$", asked)
    *others, last = [row.answer, *(answer for _, answer in row.more)]
    assert all(answer.endswith(".<end>") for answer in others) and last.endswith(".")
    assert all(re.fullmatch(r"<user>[^<]+<assistant>", prompt) for prompt, _ in row.more)
    around = "it was is a an and in the of by at on did took with that fault their its keeper costs making"
    around += " to from because owing for one"
    known = {*words(text), *words(around)}
    said = [answer.removesuffix("<end>") for answer in (*others, last)]
    assert [answer for answer in said if not {*words(answer)} <= known] in ([], [questions.CONTENT["unstated"]])


def test_the_command_writes_rows_that_training_reads(tmp_path, tokenizer, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "rows.jsonl"
    text.write_text(TEXT)
    line = ["--tokenizer", "retriever", "--rows", "40", "--lengths", "300,360", "--text", str(text), "--out", str(out)]
    assert main(["questions", *line]) == 0
    read = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(read) == 40 and "continuations" in {row["family"] for row in read}
    continued = next(row for row in read if row["family"] == "continuations")
    begun = continued["prompt"].rsplit('"', 2)[1]
    assert f"{begun}{continued['answer']}" in TEXT
    assert all(len(tokenizer.encode(row["prompt"] + row["answer"])) <= 360 for row in read)
    data = answers.open_answers([str(out)], tokenizer, 364, eval_rows=2)
    assert answers.model_batch(data.held_out).answers.min() > 0
