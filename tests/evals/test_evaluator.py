"""What evaluations share: settings from flags, batches whatever is left of a run, means and comparisons by hand."""

import argparse
import dataclasses
import shlex
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import models
from evals import answering, command_line, evaluator, report, run_settings, statistics, summaries, tasks
from evals.results import Results
from models.commands.programs import make_room
from tests.tiers import first, matrix, nightly


def flags_of(line):
    flags = argparse.ArgumentParser()
    command_line.add_setting_flags(flags)
    return flags.parse_args(shlex.split(line))


def record(score, **more):
    plain = dict(task="a", length=64, policy="h2o", budget=8, when="prompt", question="known", sample=0)
    sizes = {"cache_bytes": 10, "peak_cache_bytes": 20, "prefill": [8.0, 2.0], "decode": [0.0, 0.0]}
    return {**plain, **sizes, "score": score, **more}


def test_allocations_multiply_the_policies_that_have_none():
    settings = run_settings.make_settings(
        flags_of("--policies full,h2o,h2o@pyramid --allocations uniform,adakv --budgets 64 --when prompt")
    )
    assert [s.policy for s in settings] == ["full", run_settings.RECENCY, "h2o", "h2o@adakv", "h2o@pyramid"]


def test_a_selection_is_asked_once_per_budget_whatever_the_moments():
    settings = run_settings.make_settings(
        flags_of("--policies full,h2o,select=quest(page_size=4) --budgets 64,0.5 --when block,prompt")
    )
    reading = [s for s in settings if s.select is not None]
    assert [(s.policy, s.budget, s.evicting) for s in reading] == [
        ("select=quest(page_size=4)", 64, None), ("select=quest(page_size=4)", 0.5, None),
    ]  # fmt: skip
    assert len(settings) == 1 + 2 + 2 * 2 * 2


def test_a_reading_budget_is_that_of_every_policy():
    settings = run_settings.make_settings(
        flags_of("--policies full,h2o --budgets 64,0.5 --when block --reading-budget 0.75")
    )
    full, *others = settings
    assert full.reading_budget is None and {s.reading_budget for s in others} == {0.75}


@pytest.mark.parametrize("against", ["snapkv+caote", "full", "select=quest"])
def test_what_policies_are_compared_with_is_run_too(against):
    asked = ("", f" --against {against}")
    alone, both = (run_settings.make_settings(flags_of(f"--policies h2o --budgets 64,0.5{more}")) for more in asked)
    name = run_settings.baseline(argparse.Namespace(against=against))
    assert {s.policy for s in both} == {s.policy for s in alone} | {name} == {run_settings.RECENCY, "h2o", name}
    rows = [s.fields() for s in both]
    pairs = [(row["policy"], row["budget"], row["when"]) for row, other in report.pairs(rows, name, ["question"])]
    expected = [(s.policy, s.budget, s.when) for s in alone]
    assert sorted(map(str, pairs)) == sorted(map(str, expected))


@matrix
def test_what_reads_by_a_source_answers_as_generate_does():
    (model, tokenizer), policy = models.load("retriever"), "select=butler"
    samples = [tasks.needle(seed, tokenizer, 96, facts=2) for seed in range(2)]
    setting = run_settings.Setting(policy, 32, "prompt", "known", evict_every=0)
    aids = evaluator.load_aids(
        argparse.Namespace(model="retriever", dtype=None, networks=None), [setting], model, tokenizer
    )
    (batch,) = answering.answers(model, samples, setting, new_tokens=4, feed=answering.Feed(32, aids=aids))
    lengths = [len(sample.tokens) for sample in samples]
    alone = models.generate(
        model, answering.padded([sample.tokens for sample in samples]), lengths=lengths, budget=32, block=32,
        when="prompt", evict_every=0, max_new_tokens=4, end=(), networks=aids.networks, select=setting.select,
    )  # fmt: skip
    assert batch.tokens.tolist() == [alone.tokens[row].tolist() for row in batch.rows]


def test_the_mean_is_over_tasks_however_many_samples_they_have():
    rows = summaries.summarise([record(1.0), record(0.5, sample=1), record(0.0, task="b"), record(1.0, policy="full")])
    first, second = rows
    assert (first["policy"], first["score"], first["samples"]) == ("h2o", pytest.approx(0.375), 3)
    assert first["tasks"] == {"a": {"score": 0.75, "samples": 2}, "b": {"score": 0.0, "samples": 1}}
    assert first["low"] < 0.375 < first["high"]
    assert first["prefill_tokens_per_second"] == 4.0 and first["decode_tokens_per_second"] is None
    assert second["policy"] == "full"


def test_answers_about_one_text_are_one_sample_of_an_interval():
    alike = [record(float(i >= 30), sample=i, text=i // 10) for i in range(40)]
    (line,) = summaries.summarise(alike)
    assert (line["score"], line["samples"]) == (0.25, 40)
    assert (line["low"], line["high"]) == pytest.approx(statistics.wilson(1, 4))
    better = [record(1.0, sample=i, text=i // 10, policy="h2o+caote") for i in range(40)]
    (row,) = summaries.compare([*alike, *better])
    assert row["difference"] == 0.75 and row["low"] < 0 and row["better"] == "within noise"


def test_a_difference_is_that_of_the_means_over_tasks():
    counts = {"a": 50, "b": 5}
    one, other = (
        [
            record(score[task], sample=i, task=task, policy=policy)
            for task, count in counts.items()
            for i in range(count)
        ]
        for policy, score in (("h2o", {"a": 0.5, "b": 0.9}), ("h2o+caote", {"a": 0.6, "b": 0.3}))
    )
    lines = {line["policy"]: line["score"] for line in summaries.summarise([*one, *other])}
    (row,) = summaries.compare([*one, *other])
    assert row["difference"] == pytest.approx(lines["h2o+caote"] - lines["h2o"]) == pytest.approx(-0.25)


@pytest.mark.parametrize("ties", [4, 8])
def test_samples_without_a_difference_do_not_make_a_small_task_s_decisive(ties):
    both = [
        record(float(policy == "h2o+caote" and task == "a"), sample=i, task=task, policy=policy)
        for policy in ("h2o", "h2o+caote")
        for task, count in {"a": 4, "b": ties}.items()
        for i in range(count)
    ]
    (row,) = summaries.compare(both)
    assert (row["difference"], row["better"]) == (pytest.approx(0.5), "within noise")


def test_texts_losses_become_a_perplexity_and_its_increase_over_the_same_texts():
    """A text's loss counts once, however many questions it has; the full cache's other texts are left out."""

    def told(policy, losses, **more):
        return [
            record(1.0, sample=2 * text + place, text=text, loss=loss, policy=policy, **more)
            for text, loss in losses.items()
            for place in range(1 + (text == 0))
        ]

    full = told("full", {0: 1.0, 1: 2.0, 2: 9.0}, budget=None, when="block")
    lines = {row["policy"]: row for row in summaries.summarise([*full, *told("h2o", {0: 1.5, 1: 3.0})])}
    assert lines["h2o"]["perplexity"] == pytest.approx(np.exp(2.25))
    assert lines["h2o"]["increase"] == pytest.approx(np.exp(0.75) - 1)
    assert lines["full"]["perplexity"] == pytest.approx(np.exp(4.0)) and "increase" not in lines["full"]


def test_a_last_batch_is_filled_and_batches_are_no_larger_than_their_number_needs(tiny):
    def told(rows, batch, **more):
        return list(answering.batches(tiny[0], rows, batch, **more))

    assert told(range(5), 4) == [([0, 1, 2], [0, 1, 2]), ([3, 4], [3, 4, 3])]
    assert told([7], 4) == [([7], [7])] and told([7], 4, of=9) == [([7], [7, 7, 7])]  # as all nine: 3, 3 and 3
    assert told([], 4) == []


def test_seconds_are_those_of_steps_that_do_not_compile(monkeypatch):
    """The first block and the first two steps are left out, with their tokens."""
    now = iter([1.0, 3.0, 4.0, 10.0, 20.0, 21.0, 24.0])
    monkeypatch.setattr(answering.time, "perf_counter", lambda: next(now))
    clock = answering._BatchClock(60, 4)
    for done, nbytes in ((16, 5), (32, 9), (40, 7)):
        clock.block(done, 40, SimpleNamespace(nbytes=nbytes))
    assert clock.prefill == (60 * 24 / 40, 3.0) and clock.most == 9
    for _ in range(4):
        clock.token()
    assert clock.decode == (2 * 4, 1.0 + 3.0)


def test_batches_draw_answers_of_their_own():
    feed = answering.Feed(temperature=0.5, top_p=0.9, seed=3)
    first, again, second = (feed.drawn(rows) for rows in ([0, 1], [0, 1], [4, 5]))
    assert (first["key"] == again["key"]) and (first["key"] != second["key"])
    assert feed._replace(seed=4).drawn([0, 1])["key"] != first["key"]
    assert (first["temperature"], first["top_p"]) == (0.5, 0.9) and answering.FEED.drawn([0]) == {}


def test_a_policy_is_compared_with_itself_without_caote_on_the_same_samples():
    plain = [record(0.0, sample=i) for i in range(40)]
    better = [record(1.0, sample=i, policy="h2o+caote") for i in range(30)]
    other_length = [record(1.0, sample=i, policy="h2o+caote", length=128) for i in range(30)]
    (row,) = summaries.compare([*plain, *better, *other_length])
    assert (row["policy"], row["against"], row["length"], row["better"]) == ("h2o+caote", "h2o", 64, "yes")
    assert row["difference"] == 1.0
    recency = [record(0.5, sample=i, policy="recency") for i in range(40)]
    beside = summaries.compare([*plain, *better, *recency])
    assert [(r["policy"], r["against"], r["difference"]) for r in beside] == [
        ("h2o", "recency", -0.5), ("h2o+caote", "recency", 0.5), ("h2o+caote", "h2o", 1.0),
    ]  # fmt: skip
    assert [r["against"] for r in summaries.compare([*plain, *recency], "h2o")] == ["h2o"]
    of_tasks = {"h2o+caote": {"a": 1.0, "b": 0.0}, "h2o": {"a": 0.5, "b": 0.0}}
    both = [record(score, policy=policy, task=task) for policy, own in of_tasks.items() for task, score in own.items()]
    (row,) = summaries.compare(both)
    assert row["difference"] == 0.25  # samples of two tasks have the same numbers


def test_settings_share_a_prompt_where_they_evict_after_it():
    settings = [run_settings.Setting(policy, 40, "prompt", "known") for policy in ("snapkv+caote", "h2o@adakv")]
    settings.append(run_settings.Setting("h2o", 40, "published", "known", evict_every=0))
    assert len(run_settings.sharing(settings)) == 2  # the paper of h2o evicts after every block
    same = run_settings.Setting("snapkv", 40, "prompt", "known")
    assert run_settings.sharing([same, same, dataclasses.replace(same, budget=8)]) == [
        [same, dataclasses.replace(same, budget=8)]
    ]
    for other in (dict(cache_dtype="int8"), dict(question="unknown"), dict(policy="sage(heads='query')")):
        other = dataclasses.replace(same, **other)
        assert run_settings.sharing([same, other]) == [[same], [other]]


def test_what_was_shared_is_counted_for_the_groups_that_each_setting_answers():
    known = [run_settings.Setting(policy, 40, "prompt", "known") for policy in ("snapkv", "h2o", "tova")]
    later = [dataclasses.replace(setting, question="unknown") for setting in known]
    note = run_settings.sharing_note([(20, known), (20, later)])
    assert note == "shared prompts: 40 went through the model in place of 120"
    assert run_settings.sharing_note([(20, known[:1]), (20, later[:1])]) is None


@pytest.mark.parametrize("question", first(0, ["known"]) + first(0, ["unknown"], rest=nightly))
def test_settings_that_share_a_prompt_answer_as_each_alone(question):
    model, tokenizer = models.load("retriever")
    samples = [tasks.needle(seed, tokenizer, 96 + 16 * (seed % 2), facts=2) for seed in range(3)]
    group = evaluator.Group("x", None, 3, lambda: samples, 4, lambda answer, sample: float(answer.tokens[0]), end=())
    asked = [("full", None)] if question == "unknown" else []  # which has no use for a question held back
    asked += [("snapkv(window=16)+caote", 40), ("tova", 0.4)]
    settings = [run_settings.Setting(policy, budget, "prompt", question) for policy, budget in asked]
    together, alone = (Results(None, "x", {}, "x") for _ in range(2))
    evaluator.run(model, tokenizer, [group], settings, together, feed=answering.Feed(32, 2))
    for setting in settings:
        evaluator.run(model, tokenizer, [group], [setting], alone, feed=answering.Feed(32, 2))
    names = ("policy", "budget", "sample", "answer", "score", "cache_bytes", "peak_cache_bytes")
    plain = [sorted([str(r[name]) for name in names] for r in store.records) for store in (together, alone)]
    assert plain[0] == plain[1]


@pytest.mark.parametrize(
    "asked", first(1, [[("tova", 40, "block")], [("full", None, "prompt"), ("kvzip@uniform", 40, "prompt")]])
)
def test_questions_about_one_text_share_its_reading_and_are_answered_as_each_alone(tiny, asked):
    model, tokenizer, _ = tiny  # whose answers are others with any token more or less
    samples = [sample for seed in range(2) for sample in tasks.needles(seed, tokenizer, 112, facts=3, asked=2)]
    assert len({tuple(sample.tokens[: sample.context_end]) for sample in samples}) == 2
    settings = [run_settings.Setting(policy, budget, when, "unknown", evict_every=0) for policy, budget, when in asked]
    tokens, peaks = {}, {}
    for way, prompts in (("together", [samples]), ("alone", [[sample] for sample in samples[:2]])):
        for first_row, given in enumerate(prompts):
            found = answering.answers_each(model, given, settings, new_tokens=4, feed=answering.Feed(32, 4))
            for setting, batch in found:
                for row, answer in zip(batch.rows, batch.tokens, strict=True):
                    tokens[way, setting, first_row + row] = answer.tolist()
                assert batch.peak_cache_bytes >= batch.cache_bytes
                peaks[setting.policy] = batch.peak_cache_bytes
    if "kvzip@uniform" in peaks:  # the copies of the text are held, too, and none of the question
        assert 1.5 < peaks["kvzip@uniform"] / peaks["full"] < 2
    for setting in settings:
        assert {row for way, of, row in tokens if (way, of) == ("together", setting)} == set(range(4))
        for row in range(2):
            assert tokens["together", setting, row] == tokens["alone", setting, row]


def test_rows_of_near_lengths_lie_in_one_batch():
    model, tokenizer = models.load("retriever")
    samples = [tasks.needle(0, tokenizer, length, facts=2) for length in (192, 96, 160, 128)]
    setting = run_settings.Setting("tova", 24, "prompt", "known")
    found = answering.answers(model, samples, setting, new_tokens=1, feed=answering.Feed(32, 2))
    assert [batch.rows for batch in found] == [[1, 3], [2, 0]]


def test_the_written_command_gives_the_same_flags_again(tmp_path):
    from evals import ruler

    parser = argparse.ArgumentParser()
    ruler.add_flags(parser)
    file = tmp_path / "a file.txt"
    file.write_text("Text.")
    line = ["--policies", "full,snapkv(window=8,kernel=7)", "--essays", str(file), "--qa", "a.json", "b.json"]
    flags = parser.parse_args([*line, "--json", "out.json"])
    flags.name = "ruler"
    words = shlex.split(command_line.command_text(flags))
    assert words[:4] == ["python", "-m", "evals", "ruler"] and "--json" not in words
    again = parser.parse_args(words[4:])
    assert again.essays == file and again.qa == [Path("a.json"), Path("b.json")] and again.policies == flags.policies
    used = command_line.decisive_flags(flags)
    assert used["essays"] == [str(file)] and used["qa holds"] == [None, None]
    assert not {"json", "batch", "mesh", "against"} & used.keys()  # which may change when a run is resumed
    assert {"policies", "budgets", "model", "seed", "block"} <= used.keys()
    file.write_text("Other text.")
    assert command_line.decisive_flags(flags)["essays holds"] != used["essays holds"]


def test_compiled_programs_are_forgotten_before_the_system_runs_out_of_maps(monkeypatch):
    cleared = []
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(True))
    make_room()
    assert not cleared
    make_room(most=1)
    assert cleared == [True] * Path("/proc/self/maps").is_file()
