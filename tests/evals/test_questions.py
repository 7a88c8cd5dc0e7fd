"""Free questions: what is drawn, what an answer is judged to be, and prompts that are those of models.ask."""

import itertools
import re

import pytest

import models
from evals import questions
from evals.questions import Question, judge
from models import asking

LENGTH, FACTS = 600, 8


@pytest.fixture(scope="module")
def tokenizer():
    form = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<assistant>"
    return models.Tokenizer(models.load("retriever")[1].backend, chat_template=form)


def test_each_form_has_six_wordings_and_all_are_drawn():
    assert all(len({*form["asked"]}) >= 6 for form in questions.FORMS.values())
    drawn = [question for seed in range(20) for question in questions.draw(seed, FACTS)[1]]
    assert {question.form for question in drawn} == {*questions.FORMS}
    assert len({question.asked for question in drawn}) > 100
    assert questions.draw(3, FACTS) == questions.draw(3, FACTS) != questions.draw(4, FACTS)


@pytest.mark.parametrize("seed", range(6))
def test_a_document_states_each_answer_and_a_change_after_what_it_changes(seed, tokenizer):
    stated, asked = questions.draw(seed, FACTS)
    text = questions.document(seed, tokenizer, LENGTH, stated)
    assert LENGTH - 60 < len(tokenizer.encode(text)) <= LENGTH + 1
    for question in asked[:-1]:
        assert all(answer in text for answer in (*question.answers, *question.all, *question.never))
    assert asked[-1].form == questions.ABSENT
    for first, second in itertools.combinations(sorted(stated, key=lambda fact: fact[1]), 2):
        assert text.index(first[0]) < text.index(second[0])
    with pytest.raises(ValueError, match=r"statements take \d+ tokens, more than the length 50; lower --facts."):
        questions.document(seed, tokenizer, 50, stated)


def test_more_facts_than_there_are_is_said():
    with pytest.raises(ValueError, match="lower --facts"):
        questions.draw(0, 100)


def test_prompts_are_those_of_ask(tokenizer):
    made = questions.samples(tokenizer, LENGTH, 2, FACTS, 0)
    form = asking.Form.of(tokenizer, None)
    for sample in made:
        number, question = sample.extra
        text = questions.document(number, tokenizer, LENGTH, questions.draw(number, FACTS)[0])
        assert sample.tokens[: sample.context_end] == form.document(text)
        assert sample.tokens[sample.context_end :] == form.question(question.asked)


@pytest.mark.parametrize(
    ("answer", "question", "kind"),
    [
        ("It cost 1,200 pounds.", Question("how much", "", answers=("1200",)), "right"),
        ("It cost 12001 pounds.", Question("how much", "", answers=("1200",)), "false"),
        ("The plum pudding!", Question("which of two", "", ("plum pudding",), never=("leek soup",)), "right"),
        ("Leek soup or plum pudding.", Question("which of two", "", ("plum pudding",), never=("leek soup",)), "false"),
        ("a ferret and a goose", Question("list", "", all=("goose", "ferret")), "right"),
        ("a ferret", Question("list", "", all=("goose", "ferret")), "false"),
        ("", Question("who", "", ("Ann Bee",)), "none"),
        ("The text does not mention it.", Question("who", "", ("Ann Bee",)), "none"),
        ("The text does not say.", Question("not there", ""), "right"),
        ("It is red.", Question("not there", ""), "false"),
    ],
)
def test_an_answer_is_right_false_or_missing(answer, question, kind):
    assert judge(answer, question) == kind


def test_the_table_counts_kinds_and_forms():
    def record(answer, form, **expected):
        question = dict(form=form, asked="", **expected)
        return dict(policy="full", budget=None, length=9, answer=answer, form=form, expected=question)

    answered = [("Ann", "who", ["Ann"]), ("", "who", ["Bob"]), ("red", "not there", [])]
    told = questions.judgements([record(answer, form, answers=right) for answer, form, right in answered])
    head, _, line = (re.split(r"  +", text) for text in told.splitlines())
    found = dict(zip(head, line, strict=True))
    assert [found[name] for name in ("right", "false", "none", "who", "not there")] == ["1", "1", "1", "1/2", "0/1"]
