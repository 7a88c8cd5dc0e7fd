"""The loop that the trainers share, with a trainer of four numbers: it resumes bit for bit and writes what it says."""

import functools
import itertools
import json
import queue
import shutil
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import models
from models import commands, files, folders
from tests.bad_input.campaign import state_of
from tests.models import reference
from train import folder, interrupts, loop, meter
from train.butler import Settings
from train.checkpoints import digest
from train.text import Corpus

# The least: no objective of this file runs it.
CONFIG = models.Config(64, 16, 16, num_layers=1, num_heads=1, num_kv_heads=1, max_positions=64)
SETTINGS = Settings(tokens=6 * 2 * 8, seq_len=8, batch=2, lr=0.1)


@functools.cache
def model(seed=0, dtype=jnp.float32):
    weights = {name: array.astype(dtype) for name, array in reference.parameters(CONFIG, seed).items()}
    return reference.decoder(CONFIG, weights)


def numbers(wrong_at=None, held_out=0):
    def rows(position):
        index = position["row"] if position else 0
        while index != wrong_at:
            yield np.random.default_rng(index).integers(0, 64, 8).astype(np.int32), {"row": index + 1}
            index += 1
        raise ValueError("line 7 is wrong.")

    return Corpus(["numbers"], rows, np.full((1, 8), held_out, np.int32))


@functools.cache
def step_and_start(settings):
    """Fit the mean of the rows' tokens, with noise of each step's own."""

    def objective(model, parameters, tokens, key):
        target = tokens.astype(jnp.float32).reshape(-1, 4).mean(0) + jax.random.normal(key, (4,))
        return jnp.mean((parameters["mean"] - target) ** 2)

    mesh = loop.one_device()
    return loop.make_step(objective, settings, mesh), loop.init_state(lambda: {"mean": jnp.zeros(4)}, settings, mesh)


def run(place, corpus=None, *, settings=SETTINGS, step=None, of=None, **options):
    compiled, start = step_and_start(settings)
    trainer = loop.Trainer(
        command="train.mean",
        configuration={"mean": {"size": 4}},
        init=lambda: start,
        step=step or compiled,
        save=lambda parameters: (place / "mean.txt").write_text(str(parameters["mean"].tolist())),
        measure=lambda parameters: {"loss": float(np.sum(parameters["mean"]))},
        summarise=lambda parameters: ({"mean": parameters["mean"].tolist()}, {"first": float(parameters["mean"][0])}),
        files=("mean.txt",),
    )
    options = dict(save_every=2, eval_every=3, log_every=1) | options
    return loop.run(place, trainer, of or model(), corpus or numbers(), settings, loop.Options(**options))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run without a break, and its summary."""
    place = tmp_path_factory.mktemp("whole")
    return place, run(place)[1]


def log(place):
    return [json.loads(line) for line in (place / "log.jsonl").read_text().splitlines()]


def is_whole(place, whole):
    """Say whether a run ended as the one without a break: its numbers, and the loss of each step."""
    losses = [[(line["step"], line["loss"]) for line in log(of) if "loss" in line] for of in (place, whole[0])]
    return losses[0] == losses[1] and (place / "mean.txt").read_text() == (whole[0] / "mean.txt").read_text()


def test_any_trainer_resumes_bit_for_bit(tmp_path, whole):
    said = []
    stopped, nothing = run(tmp_path, stop_after=3)
    assert nothing is None
    again, resumed = run(tmp_path, say=said.append)
    assert said == ["resuming from the checkpoint of step 3"] and is_whole(tmp_path, whole)
    assert resumed["mean"] == whole[1]["mean"] == again["mean"].tolist() != stopped["mean"].tolist()
    described = json.loads((tmp_path / "run.json").read_text())
    assert described["mean"] == {"size": 4} and described["made"]["command"] == "train.mean.train(...)"
    assert [line["step"] for line in log(tmp_path) if "held_out/loss" in line] == [3, 6]
    assert [line["step"] for line in log(tmp_path) if "learning_rate" in line] == [1, 2, 3, 4, 5, 6]
    assert log(tmp_path)[-1]["summary/first"] == resumed["mean"][0]


def test_the_digest_of_a_checkpoint_covers_every_array():
    state = {"a": np.arange(3.0), "b": np.arange(2)}
    assert len({digest(state), digest(state | {"a": state["a"] + 1}), digest(state | {"b": state["b"] + 1})}) == 3


@pytest.mark.parametrize("damage", ["flipped", "truncated", "removed"])
def test_a_damaged_checkpoint_is_left_for_the_one_before(tmp_path, whole, damage):
    run(tmp_path, stop_after=4)
    stored = [path for path in (tmp_path / "checkpoints" / "4" / "state").rglob("*") if path.is_file()]
    largest = max(stored, key=lambda path: path.stat().st_size)
    body = bytearray(largest.read_bytes())
    if damage == "removed":
        largest.unlink()
    else:
        body[len(body) // 2] ^= 255
        largest.write_bytes(body if damage == "flipped" else body[: len(body) // 2])
    said = []
    run(tmp_path, say=said.append)
    assert "the checkpoint of step 4 is damaged" in said[0] and said[1] == "resuming from the checkpoint of step 2"
    assert is_whole(tmp_path, whole)


def test_a_checkpoint_cut_short_is_left_out(tmp_path, whole):
    run(tmp_path, stop_after=2)
    shutil.copytree(tmp_path / "checkpoints" / "2", tmp_path / "checkpoints" / "4.orbax-checkpoint-tmp")
    said = []
    run(tmp_path, say=said.append)
    assert "the checkpoint of step 4 was cut short" in said[0] and said[1] == "resuming from the checkpoint of step 2"
    assert is_whole(tmp_path, whole)


@pytest.mark.parametrize("resume", [True, False])
def test_two_runs_never_write_into_one_folder(tmp_path, resume):
    run(tmp_path, stop_after=1)
    before = state_of(tmp_path)
    with (tmp_path / files.LOCK_FILE).open("ab") as held:
        files.lock(held, tmp_path)
        with pytest.raises(ValueError, match="another run writes into"):
            run(tmp_path, resume=resume)
    assert state_of(tmp_path) == before
    run(tmp_path, resume=resume)


def test_another_run_is_refused_and_nothing_overwritten(tmp_path):
    run(tmp_path, stop_after=1)
    before = state_of(tmp_path)
    other = SETTINGS.changed(lr=0.01, seed=1)
    for options, difference in (
        (dict(of=model(1)), r"model weights .* there, .* here"),
        (dict(of=model(0, jnp.bfloat16)), 'model dtype "float32" there, "bfloat16" here'),
        (dict(settings=other), r"settings lr 0\.1 there, 0\.01 here; settings seed 0 there, 1 here"),
        (dict(corpus=numbers(held_out=1)), "data held out"),
    ):
        with pytest.raises(ValueError, match=difference):
            run(tmp_path, **options)
    assert state_of(tmp_path) == before
    run(tmp_path, of=model(1), resume=False, stop_after=2)
    assert [line["step"] for line in log(tmp_path) if "loss" in line] == [1, 2]


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    compiled, _ = step_and_start(SETTINGS)

    def bad(model, state, rows, number):
        state, loss, norm = compiled(model, state, rows, number)
        return state, np.float32("nan") if number == 3 else loss, norm

    with pytest.raises(ValueError, match="not finite in step 4; the checkpoint of step 2 is kept"):
        run(tmp_path, step=bad, log_every=3)
    assert (tmp_path / "checkpoints" / "2").exists() and not (tmp_path / "checkpoints" / "4").exists()


def test_wrong_text_ends_the_run_behind_what_was_learned(tmp_path, whole):
    with pytest.raises(ValueError, match="line 7 is wrong"):
        run(tmp_path, numbers(wrong_at=7))
    said = []
    run(tmp_path, say=said.append)
    assert said == ["resuming from the checkpoint of step 3"] and is_whole(tmp_path, whole)


def test_a_full_disk_ends_in_a_sentence(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    run(tmp_path, stop_after=2)
    monkeypatch.setattr(ocp.CheckpointManager, "save", full)
    with pytest.raises(OSError, match=r"could not be written .*No space left.*that of step 2 is kept"):
        run(tmp_path)


# --- what it shows, and how it is interrupted


@pytest.mark.parametrize(("at", "kept"), [(0, None), (3, 3), (4, 4)])
def test_ctrl_c_saves_what_was_learned_and_says_how_to_resume(tmp_path, whole, ctrl_c, at, kept):
    compiled, _ = step_and_start(SETTINGS)

    def step(model, state, rows, number):
        if number == at:
            ctrl_c()
        return compiled(model, state, rows, number)

    invocation = commands.Invocation("python -m train.mean --resume never", 0.0)
    with pytest.raises(KeyboardInterrupt) as caught:
        run(tmp_path, step=step, invocation=invocation, resume=False, log_every=3)
    if kept is None:
        assert str(caught.value) == "interrupted before the first checkpoint"
    else:
        path = tmp_path / "checkpoints" / str(kept)
        assert path.is_dir() and str(caught.value) == (
            f"interrupted; the checkpoint of step {kept} is {path}. To resume: {invocation.command} --resume auto"
        )
    run(tmp_path)
    assert (tmp_path / "mean.txt").read_text() == (whole[0] / "mean.txt").read_text()


def test_sigterm_is_ctrl_c(tmp_path):
    compiled, _ = step_and_start(SETTINGS)

    def step(model, state, rows, number):
        if number == 3:
            signal.raise_signal(signal.SIGTERM)
        return compiled(model, state, rows, number)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match="interrupted; the checkpoint of step 3 is"):
        run(tmp_path, step=step)
    assert signal.getsignal(signal.SIGTERM) is before


def test_checkpoints_come_by_the_clock_as_well(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    run(tmp_path, save_every=1000, keep=100)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} >= {"1", "2", "3", "4", "5", "6"}


def test_long_measuring_says_that_it_goes_on(monkeypatch):
    monkeypatch.setattr(meter, "WORKING", 0.001)
    said = queue.Queue()
    with meter.Meter(2, 0, True, said.put).doing("measuring held-out text"):
        assert said.get(timeout=60).startswith("step 0 of 2")
        assert said.get(timeout=60).startswith("measuring held-out text, for ")
    with meter.Meter(2, 0, False, said.put).doing("nothing that is shown"):
        pass


def test_what_is_loaded_before_the_end_of_its_run_says_so(tmp_path):
    run(tmp_path, stop_after=4)
    with pytest.warns(UserWarning, match="has not ended: it holds the checkpoint of step 4 of 6; run the same command"):
        assert folders.find(tmp_path) == tmp_path
    run(tmp_path)
    folders.find(tmp_path)


def test_ctrl_c_waits_for_a_checkpoint_and_a_second_one_does_not(ctrl_c):
    with interrupts.Interrupts() as of_run:
        done = []
        with pytest.raises(KeyboardInterrupt), of_run.held():
            ctrl_c()
            done.append("whole")
        with pytest.raises(KeyboardInterrupt), of_run.held():
            ctrl_c()
            ctrl_c()
            done.append("never")
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
    assert done == ["whole"]


def test_a_command_ends_with_the_sentence_of_its_interrupt(capsys):
    def command():
        raise KeyboardInterrupt("interrupted; to resume: x")

    assert commands.run(command, "train.mean") == 130
    assert capsys.readouterr().err == "\ntrain.mean: interrupted; to resume: x\n"


def test_lines_name_steps_whose_checkpoints_are_on_disk(tmp_path, monkeypatch):
    said = []

    def say(text):
        said.append(text.partition(",")[0])
        if text.startswith(("step 2 of", "step 4 of")):
            assert (tmp_path / "checkpoints" / text.split()[1]).is_dir()

    monkeypatch.setattr(meter, "SECONDS", 0)
    run(tmp_path, progress_bar=True, say=say)
    steps = [f"step {step} of 6" for step in (*range(7), 6)]
    assert said == [*steps, "measuring held-out text"]


def test_a_step_counts_once_its_loss_is_known_and_lines_come_by_the_clock(monkeypatch):
    said, hours = [], 3600.0
    shown = meter.Meter(1100, 1000, True, said.append)
    for step in range(12):
        shown.started(np.float32(step))
    assert shown.bar.n == 1012 - meter.AHEAD and len(said) == 1
    shown.bar.last_print_t -= hours
    shown.settle()
    shown.close("saving")
    shown.close()
    assert [line.partition(", ")[0] for line in said] == [
        "step 1,000 of 1,100",
        "step 1,011 of 1,100",
        "step 1,012 of 1,100",
        "saving",
    ]
    assert ", loss=11.0000, " in said[2] and said[2].endswith(" left")
    meter.Meter(2, 0, False, said.append).close("nothing is shown")
    assert len(said) == 4


def test_without_the_closing_measurement_a_run_is_measured_later(tmp_path, whole):
    _, summary = run(tmp_path, measure=False)
    assert summary.keys() == whole[1].keys() and summary["mean"] == {"size": 4}  # the description's, no figure
    assert [line["step"] for line in log(tmp_path) if "held_out/loss" in line] == [3]
    assert run(tmp_path)[1]["mean"] == whole[1]["mean"]


def test_other_settings_of_jax_are_another_run(tmp_path):
    run(tmp_path, stop_after=1)
    with (
        jax.default_matmul_precision("float32"),
        pytest.raises(ValueError, match='jax jax_default_matmul_precision null there, "float32" here'),
    ):
        run(tmp_path)


@pytest.mark.parametrize("name", ["log.jsonl", "mean.txt", "summary.json"])
def test_files_that_no_run_made_stay(name, tmp_path):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=f"holds {name}, which no run in this folder made"):
        run(tmp_path, resume=False)
    assert (tmp_path / name).read_text() == "mine"


def test_the_warm_up_is_rounded_to_whole_steps():
    rate = jax.jit(loop.rate_schedule(SETTINGS.changed(warmup=0.3)))
    assert float(rate(1)) == pytest.approx(0.05)  # of six steps the first two rise to 0.1


def test_what_fails_while_prefetching_is_raised():
    def items():
        yield 1
        raise OSError("no more")

    made = loop.prefetch(items())
    assert next(made) == 1
    with pytest.raises(OSError, match="no more"):
        next(made)
    assert list(loop.prefetch(iter("abc"), size=1)) == ["a", "b", "c"]


def test_a_thread_that_prefetches_ends_with_its_consumer():
    before, made = set(threading.enumerate()), loop.prefetch(itertools.count(), size=1)
    assert next(made) == 0
    (thread,) = set(threading.enumerate()) - before
    made.close()
    thread.join(10)
    assert not thread.is_alive()


# --- its folder

RUN = {"seed": 0, "settings": {"batch": 4, "cache_dtype": None}}


def test_a_run_from_before_a_setting_was_there_goes_on_with_its_default(tmp_path):
    before = {"seed": 0, "settings": {"batch": 4}}
    folder.begin_run(tmp_path, before, (), resume=True, facts={})
    folder.check_run(tmp_path, RUN, (), resume=True)
    asked = RUN | {"settings": {"batch": 4, "cache_dtype": "int8"}}
    with pytest.raises(
        ValueError, match=r'another run \(settings cache_dtype null there, "int8" here\): choose another'
    ):
        folder.check_run(tmp_path, asked, (), resume=True)


def test_another_run_may_start_anew_where_one_was_recorded(tmp_path):
    folder.begin_run(tmp_path, RUN, (), resume=True, facts={})
    with pytest.raises(ValueError, match=r"another run \(seed 0 there, 1 here\)"):
        folder.check_run(tmp_path, RUN | {"seed": 1}, (), resume=True)
    folder.check_run(tmp_path, RUN | {"seed": 1}, (), resume=False)
