"""RULER's tasks: one right answer, within the length, the same each time; the score by hand; the command end to end."""

import collections
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

import models
from evals import answering, documents, evaluator, page, ruler, ruler_tasks, run_settings
from evals.__main__ import main
from evals.results import read_records
from models import fingerprints


def paragraph(n):
    asked = {"question": f"On which river lies town {n}?", "answers": [{"text": f"river {n}"}] * 2}
    qas = [asked, {"question": "Why?", "answers": [], "is_impossible": True}]
    return {"context": f"Town {n} lies on river {n}. It has {n}00 houses.", "qas": qas}


SQUAD = {"data": [{"paragraphs": [paragraph(n) for n in range(start, start + 4)]} for start in (10, 20)]}
HOTPOT = [
    {
        "question": f"Which of {n} and {n + 1}?",
        "answer": f"answer {n}",
        "context": [[f"Title {n}", ["One. ", "Two."]], [f"Title {n + 1}", ["Three."]]],
    }
    for n in range(6)
]


def tokenizer_of(encode, **more):
    return SimpleNamespace(eos=None, encode=lambda text, add_special_tokens=True: encode(text), **more)


WORDS = tokenizer_of(lambda text: [0, *(hash(word) % 1000 + 1 for word in text.split())])  # can be counted by hand
TEXT = tokenizer_of(list)  # what a sample says can be read
CHAT = tokenizer_of(list, chat=lambda messages: f"<user>{messages[0]['content'].strip()}<assistant>")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qa")
    (folder / "squad.json").write_text(json.dumps(SQUAD))
    (folder / "hotpot.json").write_text(json.dumps(HOTPOT))
    return ruler_tasks.Sources(
        documents=dict(ruler.read_documents(folder / name) for name in ("squad.json", "hotpot.json"))
    )


def text_of(task, sources=None, length=6000, index=0):
    found = ruler_tasks.sample(task, index, TEXT, length, sources)
    return "".join(found.tokens[: found.context_end]), "".join(found.tokens[found.context_end :]), found.references


@pytest.mark.parametrize(
    ("task", "length"), [(task, 1500 + 3500 * (n % 2)) for n, task in enumerate(ruler_tasks.TASKS)]
)
def test_a_sample_is_as_long_as_fits_and_the_same_each_time(task, length, sources):
    found = ruler_tasks.sample(task, 3, WORDS, length, sources)
    room = length - ruler_tasks.NEW_TOKENS[task]
    assert room - 120 < len(found.tokens) <= room
    assert found == ruler_tasks.sample(task, 3, WORDS, length, sources)
    assert found.tokens != ruler_tasks.sample(task, 4, WORDS, length, sources).tokens
    assert 0 < found.context_end < len(found.tokens)


@pytest.mark.parametrize(
    ("task", "answers"), [(name, 4 if "multiv" in name or "multiq" in name else 1) for name in ruler_tasks.NEEDLES]
)
def test_needles_state_each_answer_once_for_the_key_that_is_asked_for(task, answers):
    context, question, references = text_of(task)
    assert len(references) == len(set(references)) == answers
    kind = "uuid" if ruler_tasks.NEEDLES[task].values == "uuids" else "number"
    stated = re.findall(rf"The {kind} of ([\w -]+) is ([\w-]+)\.", context)
    for reference in references:
        keys = [key for key, value in stated if value == reference]
        assert len(keys) == 1 and keys[0] in question
        assert reference not in question
    if kind == "number":
        assert all(re.fullmatch(r"\d{7}", reference) for reference in references)
    hidden = {"niah_multikey_1": 4, "niah_multivalue": 4, "niah_multiquery": 4}.get(task, 1)
    if ruler_tasks.NEEDLES[task].haystack != "needle":
        assert len(stated) == hidden
    else:
        assert len(stated) > 20


@pytest.mark.parametrize("seed", range(6))
def test_in_a_long_haystack_of_needles_the_key_that_is_asked_for_has_one_value(seed):
    draft = ruler_tasks._needles(np.random.default_rng(seed), ruler_tasks.NEEDLES["niah_multikey_2"], 4_000, None)
    (reference,) = draft.references
    (key,) = re.findall(rf"The number of ([\w -]+) is {reference}\.", draft.context)
    assert draft.context.count(f"The number of {key} is") == 1


def test_noise_and_essays_are_what_their_names_say(tmp_path):
    context, _, _ = text_of("niah_single_1")
    lines = context.split("\n")[1:]
    assert len(lines) - 1 == lines.count(ruler_tasks.NOISE)
    essay = tmp_path / "essays.json"
    essay.write_text(json.dumps({"text": "First one.  Second\none! Third?"}))
    sources = ruler_tasks.Sources(essay=ruler.read_essays(essay))
    context, _, references = text_of("niah_single_2", sources)
    without = re.sub(rf"The number of [\w ]+ is {references[0]}\. ?", "", context.split("\n", 1)[1]).strip()
    assert re.fullmatch(r"(First one\. Second one! Third\? ?)+(First one\. ?)?(Second one!)?", without)


@pytest.mark.parametrize("task", ruler_tasks.TASKS)
def test_in_a_chat_the_answer_begins_behind_the_assistants_header(task, sources):
    length = 12_000
    plain, chat = (ruler_tasks.sample(task, 2, CHAT, length, sources, chat=chat) for chat in (False, True))
    text = "".join(chat.tokens)
    message, begun = text.removeprefix("<user>").split("<assistant>")
    assert begun.startswith("Answer:") and "".join(plain.tokens).endswith(begun)
    assert text[chat.context_end :].count("Question: ") == 1
    assert len(text) <= length - ruler_tasks.NEW_TOKENS[task] and message[0] == plain.tokens[0]


PUBLISHED = {
    "index": 0,
    "input": "Numbers are hidden here.\nThe grass is green.\nOne of the special magic numbers for amber is: 4719.\n"
    "What is the special magic number for amber mentioned in the provided text?",
    "outputs": ["4719"],
    "length": 60,
    "answer_prefix": " The special magic number for amber mentioned in the provided text is",
}
# For each task: what comes before the question, and the question. vt and cwe have an example of both before.
ASKED = {
    "niah_multivalue": ("Text.\n", "What are all the special magic uuids for amber mentioned in the provided text?"),
    "vt": (
        "VAR A = 1\nQuestion: Find all variables that are assigned the value 1 in the text above. A\n\nVAR B = 2\n",
        "Question: Find all variables that are assigned the value 2 in the text above.",
    ),
    "cwe": (
        "1. a 2. a\nQuestion: What are the 10 most common words in the above list? Answer: a\n3. b 4. b\n",
        "Question: What are the 10 most common words in the above list?",
    ),
    "fwe": ("a b a\n", "Question: Do not provide any explanation. Please ignore the dots. What are the three?"),
    "qa_1": ("Document 1:\nQuestion: are there more?\nNo.\n\nOnly answer.\n\n", "Question: What?"),
}
# What model templates put behind the user's turn: one line, two, one with a blank line, none.
ENDS = ["<|end|>\n<|assistant|>\n", "<|im_end|> \n<|im_start|>assistant\n", "\n<extra_id_1>Assistant\n\n", " [/INST]"]


@pytest.mark.parametrize("end", ["", *ENDS])
@pytest.mark.parametrize("task", ASKED)
def test_a_published_question_is_found_before_the_end_of_a_model_template(task, end):
    known, question = ASKED[task]
    record = {**PUBLISHED, "input": f"<|user|>\n{known}{question}{end}"}
    found = documents.make_sample(ruler.PUBLISHED[task], record, TEXT, None)
    assert "".join(found.tokens[: found.context_end]) == f"<|user|>\n{known}"
    assert "".join(found.tokens[found.context_end :]) == f"{question}{end}{PUBLISHED['answer_prefix']}"


@pytest.mark.parametrize("chat", [False, True])
def test_a_published_sample_ends_with_its_question_and_what_its_answer_begins_with(chat):
    found = documents.make_sample(ruler.PUBLISHED["niah_single_1"], PUBLISHED, CHAT, None, chat=chat)
    known, rest = ("".join(found.tokens[part]) for part in (slice(found.context_end), slice(found.context_end, None)))
    assert known.rstrip().endswith("4719.")
    asked = PUBLISHED["input"].splitlines()[-1]
    assert rest.lstrip("\n") == f"{asked}{'<assistant>' if chat else ''}{PUBLISHED['answer_prefix']}"
    score = lambda task, said: documents.score(ruler.PUBLISHED[task], evaluator.Answer([], said), found)  # noqa: E731
    assert score("niah_single_1", "4719.") == 1.0 and score("niah_single_1", "4718") == 0.0


def test_published_answers_count_together_and_for_questions_any_one():
    known, question = ASKED["vt"]
    record = {**PUBLISHED, "input": known + question, "outputs": ["4719", "2650"]}
    found = documents.make_sample(ruler.PUBLISHED["vt"], record, TEXT, None)
    assert documents.score(ruler.PUBLISHED["vt"], evaluator.Answer([], "4719"), found) == 0.5
    assert documents.score(ruler.PUBLISHED["qa_1"], evaluator.Answer([], "4719"), found) == 1.0
    older = {"input": f"{known}{question} Answer: they are", "outputs": ["4719"]}  # holds its answer's beginning itself
    found = documents.make_sample(ruler.PUBLISHED["vt"], older, TEXT, None)
    assert "".join(found.tokens) == older["input"]


def test_variables_make_one_chain_in_order():
    context, question, references = text_of("vt")
    value = re.search(r"value (\d{5})", question)[1]
    links = re.findall(r"^VAR (\w{5}) = (?:VAR )?(\w+)$", context, re.MULTILINE)
    assert [name for name, _ in links] == list(references) and len(set(references)) == 5
    assert [source for _, source in links] == [value, *references[:-1]]
    example = re.findall(r"^VAR (\w{3}) = ", context, re.MULTILINE)
    assert f"are {' '.join(example)}\n" in context, "the example shows its answer"


@pytest.mark.parametrize(("length", "often", "seldom"), [(3000, 6, 1), (40_000, 30, 3)])
def test_common_words_come_as_often_as_they_should(length, often, seldom):
    context, _, references = text_of("cwe", length=length)
    listed = context.rsplit("Remember those.\n", 1)[1]
    words = re.findall(r"(\d+)\. (\S+)", listed)
    assert [int(place) for place, _ in words] == list(range(1, len(words) + 1))
    counts = collections.Counter(word for _, word in words)
    assert {counts[word] for word in references} == {often} and len(references) == 10
    assert {count for word, count in counts.items() if word not in references} == {seldom}


@pytest.mark.parametrize(("length", "often"), [(4095, 6), (4096, 30)])
def test_lists_are_rulers_from_its_shortest_length_on(length, often):
    build, least = ruler_tasks.builder("cwe", 0, length, ruler_tasks.Sources(), 0)
    words = re.findall(r"\d+\. (\S+)", build(least).context.rsplit("Remember those.\n", 1)[1])
    assert sorted(collections.Counter(words).values())[-10:] == [often] * 10


def test_frequent_words_follow_the_zeta_law():
    context, _, references = text_of("fwe", length=20_000)
    counts = collections.Counter(context.split("\n")[1].split())
    ranked = [word for word, _ in counts.most_common(4)]
    assert ranked == ["...", *references]
    for rank in (2, 3, 4):
        assert counts["..."] / counts[ranked[rank - 1]] == pytest.approx(rank**2, rel=0.1)


def test_documents_hold_the_answer_and_others_like_it(sources):
    context, question, references = text_of("qa_1", sources, length=3000, index=1)
    assert references == ("river 11",) and "town 11" in question
    assert "lies on river 11." in context
    numbers = [int(n) for n in re.findall(r"^Document (\d+):$", context, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 8
    context, _, references = text_of("qa_2", sources, length=3000, index=2)
    assert references == ("answer 2",) and "Title 2\nOne. Two." in context and "Title 3\nThree." in context


@pytest.mark.parametrize(
    ("answer", "references", "all_of", "any_one"),
    [
        ("1234567.", ["1234567"], 1.0, 1.0),
        ("the words are Amber, FALCON", ["amber", "falcon", "river", "stone"], 0.5, 1.0),
        ("", ["amber"], 0.0, 0.0),
        ("12345678", ["2345"], 1.0, 1.0),
    ],
)
def test_scores_by_hand(answer, references, all_of, any_one):
    assert ruler.recall(answer, references) == all_of
    assert ruler.any_of(answer, references) == any_one


SMALL = [
    *("--tasks", "niah_single_1", "--lengths", "256", "--samples", "4", "--policies", "full,tova"),
    *("--budgets", "96", "--when", "prompt", "--batch", "4", "--block", "64"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "ruler"
    assert main(["ruler", *SMALL, "--out", str(folder), "--plot", str(folder.parent / "map.png")]) == 0
    return folder


def test_the_command_writes_records_figures_and_a_picture(finished):
    records = read_records(finished)
    assert len(records) == 4 * 3
    assert {r["policy"] for r in records} == {"full", "tova", run_settings.RECENCY}
    figures = json.loads((finished / "figures.json").read_text())
    assert [r["policy"] for r in figures["results"]] == ["full", run_settings.RECENCY, "tova"]
    assert figures["command"].startswith("python -m evals ruler --tasks niah_single_1")
    assert (finished.parent / "map.png").read_bytes().startswith(b"\x89PNG")


def test_the_folder_becomes_a_page_with_a_command_for_each_row(finished, tmp_path):
    assert main(["report", str(finished), "--html", str(tmp_path / "page.html")]) == 0
    rows = page.figures(finished)["rows"]
    assert [row["policy"] for row in rows] == ["full", run_settings.RECENCY, "tova"]
    assert "--policies tova --budgets 96" in rows[2]["command"] and "--lengths 256" in rows[2]["command"]
    assert rows[2]["command"] in (tmp_path / "page.html").read_text()


def test_a_record_is_what_generate_gives(finished):
    model, tokenizer = models.load("retriever")
    for record in read_records(finished):
        if record["policy"] != "tova" or record["sample"]:
            continue
        sample = ruler_tasks.sample(record["task"], 0, tokenizer, 256)
        out = models.generate(
            model, [sample.tokens], policy="tova", budget=96, block=64, when="prompt", max_new_tokens=128
        )
        said = [token for token in out.tokens[0, : int(out.lengths[0])].tolist() if token not in model.config.eos]
        assert record["answer"] == tokenizer.decode(said)
        assert record["score"] == ruler.recall(record["answer"], sample.references)


def test_a_killed_run_goes_on_where_it_was(finished, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    lines = (finished / "samples.jsonl").read_text().splitlines(keepends=True)
    (folder / "header.json").write_bytes((finished / "header.json").read_bytes())
    (folder / "samples.jsonl").write_text("".join(lines[:5]) + lines[5][:30])
    asked = []
    whole = answering.answers_each

    def answers_each(*given, rows, **more):
        asked.extend(row for of_setting in rows.values() for row in of_setting)
        return whole(*given, rows=rows, **more)

    monkeypatch.setattr(evaluator, "answers_each", answers_each)
    assert main(["ruler", *SMALL, "--out", str(folder)]) == 0
    assert len(asked) == 7, "only what was missing is answered, in a group of which one setting is complete"
    same = [
        [{k: r[k] for k in r if k not in ("prefill", "decode")} for r in read_records(x)] for x in (finished, folder)
    ]
    assert same[0] == same[1]
    assert main(["ruler", *SMALL, "--seed", "1", "--out", str(folder)]) == 2
    assert "seed was 0 and is 1" in capsys.readouterr().err
    monkeypatch.setattr(fingerprints, "weights_of", lambda *_: "others")
    assert main(["ruler", *SMALL, "--out", str(folder)]) == 2
    assert "was made with different weights" in capsys.readouterr().err
