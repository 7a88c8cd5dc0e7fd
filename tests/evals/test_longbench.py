"""LongBench, InfiniteBench and Booksum from files: prompts, middle truncation, references, scores, commands."""

import argparse
import csv
import hashlib
import io
import json
import sys
import urllib.error
import zipfile
from pathlib import Path

import pytest

import models
from evals import booksum, documents, evaluator, infinitebench, longbench, metrics
from evals.__main__ import main
from evals.evaluator import Answer, TextSample
from evals.results import read_records

RECORD = {
    "input": "Which river?",
    "context": "The town lies on a river. " * 8,
    "answers": ["the Elbe", "Elbe river"],
    "all_classes": ["River", "Town"],
    "dataset": "x",
}
INFINITE = json.loads(Path(__file__).with_name("infinitebench.json").read_text())  # a record of each task


@pytest.fixture(scope="module")
def tokenizer(retriever):
    return retriever[1]


def write(folder, name, records):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.mark.parametrize("name", longbench.TASKS)
def test_each_prompt_holds_context_and_question_in_this_order(name, tokenizer):
    task = longbench.TASKS[name]
    sample = documents.make_sample(task, RECORD, tokenizer, 4000)
    known = tokenizer.decode(sample.tokens[: sample.context_end])
    whole = tokenizer.decode(sample.tokens)
    assert known.rstrip().endswith("on a river.")
    assert ("Which river?" in whole) == ("{input}" in task.prompt)
    assert "Which river?" not in known
    assert sample.references == ("the Elbe", "Elbe river")


@pytest.mark.parametrize(("length", "expected"), [(6, 4), (7, 5), (10, 8), (4, 2), (3, 1)])
def test_the_middle_goes_and_the_question_stays(length, expected):
    tokens, end = documents.cut_middle(list(range(10)), 8, length)
    assert len(tokens) == length and tokens[0] == 0 and tokens[-1] == 9
    assert end == expected
    assert tokens[end:] == [8, 9]
    # A long question that is cut itself leaves the head known.
    assert documents.cut_middle(list(range(10)), 5, 4) == ([0, 1, 8, 9], 2)


def test_the_best_reference_counts_and_few_shot_answers_end_with_their_line():
    score = lambda name, text: documents.score(  # noqa: E731
        longbench.TASKS[name], Answer([], text), TextSample([], 0, ("the Elbe", "Elbe river"), RECORD)
    )
    assert score("hotpotqa", "Elbe river") == 1.0
    assert score("hotpotqa", "the Elbe\nQuestion") == metrics.f1("the Elbe\nQuestion", "the Elbe")
    assert score("triviaqa", "\nthe Elbe\nQuestion") == 1.0
    sample = TextSample([], 0, ("River",), RECORD)  # classes come from the record
    assert documents.score(longbench.TASKS["trec"], Answer([], "River or Town"), sample) == 0.5


def test_chat_prompts_go_into_the_template_and_few_shot_ones_do_not(tokenizer):
    chat = models.Tokenizer(tokenizer.backend, None, "<<{{ messages[0].content | trim }}>> Answer")
    wrapped = documents.make_sample(longbench.TASKS["qasper"], RECORD, chat, 4000, chat=True)
    assert tokenizer.decode(wrapped.tokens).startswith("<<") and tokenizer.decode(wrapped.tokens).endswith("Answer")
    assert tokenizer.decode(wrapped.tokens[: wrapped.context_end]).rstrip().endswith("on a river.")
    plain = documents.make_sample(longbench.TASKS["trec"], RECORD, chat, 4000, chat=True)
    assert "<<" not in tokenizer.decode(plain.tokens)


@pytest.mark.parametrize("name", INFINITE)
def test_each_task_of_infinitebench_reads_its_record(name, tokenizer):
    task, record = infinitebench.TASKS[name], INFINITE[name]
    sample = documents.make_sample(task, record, tokenizer, 4000)
    assert 0 < sample.context_end <= len(sample.tokens)
    right = {
        "longbook_choice_eng": "B. fox", "code_debug": "B. b", "math_calc": "[1, 3]", "math_find": " 9",
        "longdialogue_qa_eng": " Anna", "kv_retrieval": '"b-1"', "longbook_sum_eng": "It is a book.", "code_run": "-3.",
    }.get(name) or record["answer"][0]  # fmt: skip
    assert documents.score(task, Answer([], right), sample) == 1.0
    assert documents.score(task, Answer([], "wrong"), sample) == 0.0


def test_published_prompts_are_read_from_a_folder(tmp_path, tokenizer):
    (tmp_path / "dataset2prompt.json").write_text(json.dumps({"trec": "T {context} I {input}", "dureader": "x"}))
    (tmp_path / "dataset2maxlen.json").write_text(json.dumps({"trec": 3}))
    tasks = longbench.read_tasks(tmp_path)
    assert tasks["trec"].prompt == "T {context} I {input}" and tasks["trec"].new_tokens == 3
    assert tasks["lcc"] == longbench.TASKS["lcc"]
    (tmp_path / "dataset2prompt.json").write_text(json.dumps({"trec": "no place"}))
    with pytest.raises(ValueError, match="the prompt of trec does not have"):
        longbench.read_tasks(tmp_path)


class Web:
    """What lies at addresses, and what was asked for."""

    def __init__(self, monkeypatch, tmp_path):
        self.files, self.asked = {}, []
        monkeypatch.setattr(documents.urllib.request, "urlopen", self.open)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def open(self, address, timeout):
        self.asked.append(address)
        if address not in self.files:
            raise urllib.error.URLError("no route")
        return io.BytesIO(self.files[address])

    def publish(self, text, name="prompts.json"):
        file = documents.PublishedFile(f"https://example.org/{name}", hashlib.sha256(text.encode()).hexdigest())
        self.files[file.address] = text.encode()
        return file


@pytest.fixture
def web(monkeypatch, tmp_path):
    return Web(monkeypatch, tmp_path)


def test_a_published_file_is_fetched_once_and_mended_where_its_copy_is_damaged(web, tmp_path):
    file = web.publish("Prüfung")
    assert documents.published_text(file) == "Prüfung" and documents.published_text(file) == "Prüfung"
    assert web.asked == [file.address]
    (kept,) = (tmp_path / "cache/kvjax/published").iterdir()
    kept.write_text("damaged")
    assert documents.published_text(file) == "Prüfung" and kept.read_text(encoding="utf-8") == "Prüfung"
    assert len(web.asked) == 2


def test_another_file_at_the_address_is_neither_used_nor_kept(web, tmp_path):
    file = web.publish("published")
    web.files[file.address] = b"<html>Log in</html>"
    with pytest.raises(ValueError, match=r"example.org/prompts.json has another digest than expected"):
        documents.published_text(file)
    assert not (tmp_path / "cache").exists()


def test_an_address_that_cannot_be_reached_is_named(web):
    file = documents.PublishedFile("https://example.org/gone.json", "0" * 64)
    with pytest.raises(FileNotFoundError, match=r"cannot get https://example.org/gone.json \(no route\); name a copy"):
        documents.published_text(file)


def test_a_cache_that_cannot_be_written_to_is_done_without(web, tmp_path):
    (tmp_path / "cache").write_text("a file")
    file = web.publish("text")
    assert documents.published_text(file) == "text" and documents.published_text(file) == "text"
    assert len(web.asked) == 2


def test_longbenchs_official_prompts_come_from_their_address(web, monkeypatch):
    monkeypatch.setattr(longbench, "PROMPTS", web.publish(json.dumps({"trec": "T {context}{input}"}), "prompts"))
    monkeypatch.setattr(longbench, "LENGTHS", web.publish(json.dumps({"trec": 3}), "lengths"))
    task = longbench.read_tasks(documents.OFFICIAL)["trec"]
    assert (task.prompt, task.new_tokens) == ("T {context}{input}", 3)


PUBLISHED = """from nothing import it
gpt4_templates = {"passkey": "other {context}"}
yarn_mistral_templates = {
    "passkey": "P {context}: {input}",  # noqa
    "longbook_qa_eng": "Q {context}: {question}",
    "longbook_choice_eng": "C {context}: {question} {OPTION_A} {OPTION_D}",
    "math_find": "{prefix} {context} {input}",
}
"""


def test_infinitebenchs_official_prompts_are_read_and_not_run(web, monkeypatch, tokenizer, tmp_path):
    monkeypatch.setattr(infinitebench, "PROMPTS", web.publish(PUBLISHED, "prompt.py"))
    tasks = infinitebench.read_tasks(documents.OFFICIAL)
    (tmp_path / "prompt.py").write_text(PUBLISHED)
    assert infinitebench.read_tasks(tmp_path / "prompt.py") == tasks
    said = {
        name: tokenizer.decode(documents.make_sample(tasks[name], INFINITE[name], tokenizer, 4000).tokens)
        for name in ("longbook_qa_eng", "longbook_choice_eng", "math_find")
    }
    assert said["longbook_qa_eng"].endswith("Q A: Who?")
    assert said["longbook_choice_eng"].endswith("C A: Who? owl dog")
    assert said["math_find"].endswith("in the following list? [3, 9] The largest number of the list is")
    assert tasks["code_run"] == infinitebench.TASKS["code_run"]


def test_records_come_from_the_hubs_archive(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/trec.jsonl", json.dumps(RECORD) + "\n\n" + json.dumps(RECORD))
    monkeypatch.setattr(documents, "hub_file", lambda repository, file: tmp_path / file)
    assert list(documents.read_records("hub", "trec.jsonl", longbench.DATA.hub)) == [RECORD, RECORD]
    with pytest.raises(FileNotFoundError, match=r"holds no lcc\.jsonl"):
        list(documents.read_records("hub", "lcc.jsonl", longbench.DATA.hub))


def test_the_command_answers_from_a_folder(tmp_path, capsys):
    data = write(tmp_path / "data", "multifieldqa_en", [RECORD, {**RECORD, "context": "The town. " * 200}])
    write(data, "trec", [RECORD])
    line = f"longbench --data {data} --policies full --block 64 --length 128 --batch 2"
    assert main([*line.split(), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "multifieldqa_en" in out and "kvjax's wording" in out and "as LongBench's script computes" in out
    records = read_records(tmp_path / "out")
    assert len(records) == 3 and max(r["prompt_tokens"] for r in records) == 128
    write(data, "trec", [RECORD, RECORD])
    assert main([*line.split(), "--out", str(tmp_path / "out")]) == 2
    assert "data holds was" in capsys.readouterr().err


def test_a_missing_metric_is_known_before_the_first_answer(tmp_path, capsys, monkeypatch):
    metrics._rouge.cache_clear()
    monkeypatch.setitem(sys.modules, "rouge", None)
    monkeypatch.setattr(evaluator, "run", None)
    data = write(tmp_path / "data", "samsum", [RECORD])
    assert main(["longbench", "--data", str(data), "--tasks", "samsum", "--policies", "full", "--length", "64"]) == 2
    assert "rouge is not installed; install it with: pip install -e '.[eval]'" in capsys.readouterr().err


def test_other_prompts_are_other_data(tmp_path, tokenizer):
    data = write(tmp_path, "trec", [RECORD])
    flags = argparse.Namespace(data=str(data), tasks="trec", samples=None, length=None, chat=False)
    config = models.load("retriever")[0].config
    tasks = documents.with_prompts(longbench.TASKS, {"trec": "T {context} {input}"}, {}, "x")
    one, other = (
        longbench.DATA._replace(read_tasks=lambda _, each=each: each).make_groups(flags, config, tokenizer)[0].data
        for each in (longbench.TASKS, tasks)
    )
    assert one != other


# --- Booksum: rows of a CSV with whole chapters in them

FOX = 'The fox ran.\n\n"Stop," said the owl, twice. ' * 9
ROWS = [
    {"bid": "1", "chapter": FOX, "summary_text": "A fox ran.\nAn owl spoke."},
    {"bid": "1", "chapter": "The river was calm. " * 12, "summary_text": "Nothing happens."},
]


def write_rows(folder, rows=ROWS):
    folder.mkdir(exist_ok=True)
    with (folder / "test.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["bid", "chapter", "summary_text"])
        writer.writeheader()
        writer.writerows(rows)
    return folder


def test_rows_are_read_as_they_were_written(tmp_path):
    rows = [*ROWS, {**ROWS[0], "chapter": "A whole book. " * 20_000}]  # the csv module's own limit is 131,072
    assert list(documents.read_records(str(write_rows(tmp_path, rows)), "test.csv", iter)) == rows


def test_a_chapter_and_a_summary_become_a_prompt_and_a_reference(tokenizer):
    task = booksum.TASKS["booksum"]
    sample = documents.make_sample(task, ROWS[0], tokenizer, 4000)
    assert ROWS[0]["chapter"] in tokenizer.decode(sample.tokens[: sample.context_end])
    assert tokenizer.decode(sample.tokens[sample.context_end :]).endswith("Summary:")
    assert sample.references == ("A fox ran.\nAn owl spoke.",)
    # Of 3 and 6 words "a", "fox" and "ran" are in common, in order.
    assert documents.score(task, Answer([], "A fox ran"), sample) == pytest.approx(2 * 3 / (3 + 6))
