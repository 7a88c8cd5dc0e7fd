"""lm-evaluation-harness's model class: likelihoods against the plain forward pass, a local task end to end."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import models
from evals import harness, loglikelihood, selections, simulator
from evals.__main__ import main
from models import files, fingerprints
from papers.caote import fidelity
from tests.evals.test_selections import simulate
from tests.tiers import matrix

TEXT = (
    "The code of amber falcon is 4719. The river was calm and the baker counted steps. The code of bold harp is 2650."
)


@matrix
def test_a_continuation_is_read_behind_the_compressed_context(retriever):
    model, tokenizer = retriever
    sequence = tokenizer.encode(
        f"{TEXT} Question: what is the code of amber falcon?\nAnswer: the code of amber falcon is 4719"
    )
    settings = {"policy": "recency", "budget": 24, "when": "prompt", "block": 16}
    found = loglikelihood.predict(model, [sequence], [4], **settings)[0]
    context, length = np.array([sequence[:-4]]), len(sequence) - 4
    cache, logits = models.prefill(model, context, **settings, reserve=4)
    behind = fidelity.outputs(
        model, cache, np.array([sequence[-4:-1]]), length + np.arange(3)[None], np.array([length + 4])
    ).logits
    expected = jax.nn.log_softmax(np.concatenate([logits[:, None], behind], axis=1))[0, np.arange(4), sequence[-4:]]
    assert found.log_probability[-4:] == pytest.approx(np.asarray(expected), abs=1e-3)
    full = loglikelihood.predict(model, [sequence], [4], block=16)[0]
    assert full.log_probability[-4:].sum() > found.log_probability[-4:].sum() + 1, "the fact was evicted"


@pytest.fixture(scope="module")
def kvjax_lm():
    pytest.importorskip("lm_eval")
    return harness.model_class()(policy="tova", budget=24, block=16, batch_size=2, max_length=96)


@matrix
def test_a_selection_reads_its_share_of_the_tokens_in_every_row(retriever):
    model, tokenizer = retriever
    sequences = [tokenizer.encode(TEXT), tokenizer.encode(TEXT)[:9]]
    quest = selections.parse_selection("quest(page_size=4)")
    found = loglikelihood.simulate(model, sequences, simulator.Simulation(quest, 0.5, sinks=2), block=16)
    for sequence, one in zip(sequences, found, strict=True):
        logits = jax.nn.log_softmax(simulate(model, np.array([sequence]), quest, 0.5, sinks=2))[0]
        expected = np.asarray(logits)[np.arange(len(sequence) - 1), sequence[1:]]
        assert one.log_probability == pytest.approx(expected, abs=2e-4)
    everything = loglikelihood.simulate(model, sequences, simulator.Simulation(quest), block=16)
    plain = loglikelihood.predict(model, sequences, block=16)
    assert everything[0].log_probability == pytest.approx(plain[0].log_probability, abs=2e-4)


def request(*args):
    return SimpleNamespace(args=args)


def test_the_registry_knows_the_model():
    pytest.importorskip("lm_eval")
    from lm_eval.api.registry import get_model

    kind = harness.model_class()
    assert get_model("kvjax") is kind
    made = kind.create_from_arg_string("policy=snapkv(window=8,kernel=7),budget=16,block=16", {"device": None})
    assert made.settings == {"policy": "snapkv(window=8,kernel=7)", "budget": 16, "block": 16, "when": "prompt"}


@matrix
def test_requests_are_answered_in_their_order(kvjax_lm):
    pairs = [("Question: what is it?\nAnswer: the code is", f" {code}") for code in ("4719", "12")]
    together = kvjax_lm.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
    alone = [kvjax_lm.loglikelihood([request(*pair)], disable_tqdm=True)[0] for pair in pairs]
    for (one, greedy), (other, same) in zip(together, alone, strict=True):
        assert one == pytest.approx(other, abs=1e-3) and greedy == same
        assert one < 0
    (value, _), *_ = kvjax_lm.loglikelihood([request("", "The river was calm")], disable_tqdm=True)
    (rolling,) = kvjax_lm.loglikelihood_rolling([request("The river was calm")], disable_tqdm=True)
    assert value == pytest.approx(rolling, abs=1e-3)  # an empty context is the begin token


def test_generation_stops_at_the_first_stop(kvjax_lm):
    prompt = f"{TEXT} Question: what is the code of amber falcon?\nAnswer: the code of amber falcon is"
    asked = {"until": [".", "\n"], "max_gen_toks": 12}
    answers = kvjax_lm.generate_until(
        [request(prompt, asked), request("The river", {"max_gen_toks": 3})], disable_tqdm=True
    )
    assert len(answers) == 2 and "." not in answers[0] and answers[1]
    with pytest.raises(ValueError, match="answers greedily"):
        kvjax_lm.generate_until([request(prompt, {"do_sample": True, "temperature": 1.0})], disable_tqdm=True)


def test_stops_and_limits_are_the_harness_s_own(kvjax_lm):
    def answer(**asked):
        (text,) = kvjax_lm.generate_until([request("The river", asked)], disable_tqdm=True)
        return text

    whole = answer(max_gen_toks=12)
    assert answer(until=[""], max_gen_toks=12) == whole, "an empty stop stops nothing"
    assert answer(until=[whole[4:7]], max_gen_toks=12) == whole[: whole.find(whole[4:7])]
    assert {answer(**{name: 3}) for name in harness.LIMITS} == {answer(max_gen_toks=3)}
    assert answer(temperature=0.7, do_sample=False, max_gen_toks=3) == answer(max_gen_toks=3)
    with pytest.raises(ValueError, match="answers greedily"):
        answer(temperature=0.7)
    special = kvjax_lm.text.special_tokens["bos_token"]
    row = [*kvjax_lm.text.encode("The river", False), kvjax_lm.text.bos, *kvjax_lm.text.encode(" was calm", False)]
    assert kvjax_lm._ended(row, [special]) == "The river"
    assert kvjax_lm._ended(row, [" calm"]).endswith(" was")


def test_a_choice_longer_than_the_limit_is_refused(kvjax_lm):
    with pytest.raises(ValueError, match="a choice has 97 tokens, but max_length is 96"):
        kvjax_lm._loglikelihood_tokens([(None, [1], [2] * 97)], disable_tqdm=True)


def test_a_last_message_that_a_task_begins_is_continued(kvjax_lm, monkeypatch):
    form = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
    monkeypatch.setattr(kvjax_lm.text, "chat_template", form + "{% if add_generation_prompt %}<assistant>{% endif %}")
    asked = [{"role": "user", "content": "Which?"}]
    assert kvjax_lm.apply_chat_template(asked) == "<user>Which?<end>\n<assistant>"
    begun = [*asked, {"role": "assistant", "content": "The best answer is "}]
    expected = "<user>Which?<end>\n<assistant>The best answer is "
    assert kvjax_lm.apply_chat_template(begun, add_generation_prompt=False) == expected
    with pytest.raises(ValueError, match="so it cannot be continued"):
        kvjax_lm.apply_chat_template([*asked, {"role": "assistant", "content": " "}], add_generation_prompt=False)


def test_a_chat_template_that_writes_bos_leaves_one(kvjax_lm, monkeypatch):
    form = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(kvjax_lm.text, "chat_template", form)
    prompt = kvjax_lm.apply_chat_template([{"role": "user", "content": TEXT}])
    whole = kvjax_lm.text.encode(TEXT)
    assert whole.count(kvjax_lm.text.bos) == 1
    assert kvjax_lm.tok_encode(prompt) == whole == kvjax_lm.tok_encode(TEXT)
    context, continuation = kvjax_lm._encode_pair(prompt, " Why")
    assert (context, continuation) == (whole, kvjax_lm.text.continuation(" Why"))
    fed = []
    monkeypatch.setattr(models, "stream", lambda model, tokens, **_: fed.append(tokens[0].tolist()) or [])
    monkeypatch.setattr(kvjax_lm, "max_length", 200)
    kvjax_lm.generate_until([request(prompt, {"max_gen_toks": 3})], disable_tqdm=True)
    assert fed == [whole]


def test_a_choice_that_shares_a_token_with_its_context_is_encoded_alone(kvjax_lm):
    tokenizer = kvjax_lm.text
    whole = tokenizer.encode("The river")
    assert len(whole) == 3 and whole[-1] == tokenizer.encode(" river")[-1]
    context, continuation = kvjax_lm._encode_pair("The riv", "er")
    assert len(context) >= len(whole), "nothing would be left behind it"
    assert continuation == tokenizer.continuation("er")
    assert kvjax_lm._encode_pair("The ", "river") == (whole[:-1], whole[-1:])
    with pytest.raises(ValueError, match="a choice behind 'The river' is empty"):
        kvjax_lm._encode_pair("The river", "")


def test_a_simulated_selection_decodes_no_answers():
    pytest.importorskip("lm_eval")
    made = harness.model_class()(select="h2o", budget=0.5, block=16)
    with pytest.raises(ValueError, match="simulated on whole texts only"):
        made.generate_until([request("The river", {"max_gen_toks": 3})], disable_tqdm=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(policy="tova"), "needs a budget"),
        (dict(select="quest", budget=0.5, cache_dtype="int8"), "leave cache_dtype out"),
        (dict(select="quest"), "give the share that is read"),
        (dict(select="quest", policy="tova", budget=0.5), "give one of them"),
        (dict(speed=3), "has no argument speed"),
        (dict(select="quest", budget=0.5, when="block"), "when was given, which a selection does not read"),
        (dict(policy="tova", budget=8, sinks=7), "sinks was given, which a policy does not read"),
        (dict(batch_size=-4), "batch_size is -4; give at least 1"),
        (dict(max_length="abc"), "max_length is 'abc'; give at least 1"),
    ],
)
def test_bad_arguments_end_in_one_sentence(arguments, message):
    pytest.importorskip("lm_eval")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        harness.model_class()(**arguments)


TASK = Path(__file__).with_name("amber.yaml").read_text()
RECORDS = [
    {"text": TEXT, "choices": ["4719", "2650", "1111"], "label": 0},
    {"text": TEXT.replace("4719", "9034"), "choices": ["4719", "9034", "1111"], "label": 1},
]


def write_records(file):
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))


@pytest.fixture
def local_tasks_alone(monkeypatch):
    """The harness without the tasks it ships: a run of the command would read their 14,000 files first."""
    shipped = pytest.importorskip("lm_eval.tasks")
    monkeypatch.setattr(shipped, "TaskManager", functools.partial(shipped.TaskManager, include_defaults=False))


@pytest.mark.usefixtures("local_tasks_alone")
@matrix
def test_a_local_task_runs_and_goes_on_from_its_answers(tmp_path, capsys, monkeypatch):
    write_records(tmp_path / "amber.jsonl")
    (tmp_path / "amber.yaml").write_text(TASK.replace("FOLDER", str(tmp_path)))
    line = ["lm_eval", "--tasks", "amber", "--include_path", str(tmp_path), "--out", str(tmp_path / "run")]
    line += ["--model_args", "block=32", "--model_args", "policy=recency,budget=16,block=32,when=prompt"]
    line += ["--against", "full"]
    assert main([*line, "--json", str(tmp_path / "out.json")]) == 0
    data = json.loads((tmp_path / "out.json").read_text())
    found = data["results"]
    accuracy = {r["policy"]: r["value"] for r in found if r["metric"] == "acc"}
    assert accuracy["full"] == 1.0 and len(accuracy) == 2
    (compared,) = [c for c in data["comparisons"] if c["metric"] == "acc"]
    assert (compared["policy"], compared["against"]) == ("recency", "full")
    assert compared["difference"] == accuracy["recency"] - 1
    assert "amber" in capsys.readouterr().out
    monkeypatch.setattr(loglikelihood, "predict", None)  # all is answered already
    assert main([*line, "--json", str(tmp_path / "again.json")]) == 0
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["results"] == found and again["command"].startswith("python -m evals lm_eval --tasks amber")
    with (tmp_path / "run" / files.LOCK_FILE).open("ab") as held:
        files.lock(held, tmp_path / "run")
        assert main(line) == 2
    assert "another run writes into" in capsys.readouterr().err
    monkeypatch.setattr(fingerprints, "weights_of", lambda *_: "others")
    assert main(line) == 2
    assert "was made with different weights" in capsys.readouterr().err


@pytest.mark.usefixtures("local_tasks_alone")
@matrix
def test_a_task_reads_a_file_in_place_of_its_data(tmp_path, capsys):
    (tmp_path / "amber.yaml").write_text(TASK.replace("FOLDER", str(tmp_path / "nowhere")))
    line = ["lm_eval", "--tasks", "amber", "--include_path", str(tmp_path), "--model_args", "block=32"]
    line += ["--data", str(tmp_path), "--json", str(tmp_path / "out.json")]
    assert main(line) == 2
    assert f"there is neither amber.jsonl nor amber.parquet in {tmp_path}" in capsys.readouterr().err
    write_records(tmp_path / "amber.jsonl")
    assert main(line) == 0
    (accuracy,) = [
        r["value"] for r in json.loads((tmp_path / "out.json").read_text())["results"] if r["metric"] == "acc"
    ]
    assert accuracy == 1.0
