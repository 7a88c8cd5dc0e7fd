"""Fine-tuning under a policy: the loss is that of the evaluations, a run lowers it, and its model loads."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import models
from evals import loglikelihood
from models import adapters
from models.parameters import split_weights
from tests.models import reference
from tests.models.commands.test_chat import spaced
from tests.tiers import matrix
from train import answers, finetune, loop, lora
from train.text import Corpus

# It is trained: as small as can be, with a token that ends answers.
CONFIG = models.Config(64, 16, 24, num_layers=2, num_heads=4, num_kv_heads=2, max_positions=64, bos=0, eos=(1,))
SETTINGS = finetune.Settings(
    tokens=4 * 2 * 24, seq_len=24, batch=2, lr=0.01, policy="h2o+caote", budget=8, block=8, warmup=0.0
)
TEXT = np.random.default_rng(0).integers(2, 64, (4, 24)).astype(np.int32)


def model() -> models.Decoder:
    return reference.decoder(CONFIG)


def questions(count: int = 4) -> np.ndarray:
    """Prompts of 17 tokens or fewer, and answers of five or fewer; in every second row a question more."""
    random = np.random.default_rng(1)
    sizes = [[(17 - row % 3, 5 - row % 2)] if row % 2 == 0 else [(10, 3), (4, 2)] for row in range(count)]
    return np.stack(
        [answers.row_of([tuple(random.integers(2, 64, size) for size in turn) for turn in each], 24) for each in sizes]
    )


def corpus(rows: np.ndarray) -> Corpus:
    def of(position):
        index = position["row"] if position else 0
        while True:
            yield rows[index % len(rows)], {"row": index + 1}
            index += 1

    return Corpus(["rows"], of, rows[:2])


# --- the loss --------------------------------------------------------------------------------------------------------


def test_the_loss_of_a_batch_is_the_mean_likelihood_of_its_learned_tokens():
    rows = questions(2)
    fed = answers.model_batch(rows)
    found = loglikelihood.predict(
        model(), [row[: length + 1].tolist() for row, length in zip(fed.tokens, fed.lengths, strict=True)],
        fed.answers.tolist(), policy="h2o+caote", budget=8, block=8,
    )  # fmt: skip
    told = [
        -one.log_probability[row[1:][: len(one.log_probability)] >= 0] for one, row in zip(found, rows, strict=True)
    ]
    assert [len(losses) for losses in told] == [5, 5]
    loss = jax.jit(lambda model: finetune.loss_of(model, rows, SETTINGS))(model())
    assert loss == pytest.approx(np.concatenate(told).mean(), rel=1e-5)
    assert finetune.held_out_loss(model(), rows, SETTINGS, "h2o+caote") == pytest.approx(float(loss), rel=1e-5)


def test_with_the_full_cache_the_loss_of_text_and_its_gradient_are_the_dense_model_s():
    rows = TEXT[:2]
    fed = answers.model_batch(rows)
    parameters = model().arrays()

    def dense(parameters):
        logits = models.Decoder(CONFIG, parameters)(jnp.asarray(fed.tokens[:, :-1]))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(fed.tokens[:, 1:]))
        return jnp.sum(jnp.where(fed.learned, losses, 0)) / fed.learned.sum()

    def ours(parameters):
        return finetune.loss_of(models.Decoder(CONFIG, parameters), rows, SETTINGS.changed(policy="full"))

    expected, slopes = jax.jit(jax.value_and_grad(dense))(parameters)
    loss, gradients = jax.jit(jax.value_and_grad(ours))(parameters)
    assert loss == pytest.approx(float(expected), rel=1e-5)
    for name, slope in slopes.items():
        np.testing.assert_allclose(gradients[name], slope, rtol=1e-3, atol=1e-6, err_msg=name)


@matrix
def test_with_a_cache_of_eight_bits_the_loss_is_that_of_reading_it_and_keys_and_values_learn():
    sharp = {name: array * (8 if "layers" in name else 1) for name, array in model().arrays().items()}
    floats = SETTINGS.changed(policy="h2o+caote+protect(recent=0)")
    eight, tuned = floats.changed(cache_dtype="int8"), models.Decoder(CONFIG, sharp)

    def ours(parameters):
        return finetune.loss_of(models.Decoder(CONFIG, parameters), TEXT[:2], eight)

    loss, gradients = jax.jit(jax.value_and_grad(ours))(sharp)
    rounded, exact = (finetune.held_out_loss(tuned, TEXT[:2], some, some.policy) for some in (eight, floats))
    assert float(loss) == pytest.approx(rounded, rel=2e-6) and abs(rounded / exact - 1) > 2e-5
    by_name = split_weights(CONFIG, gradients)
    assert all(abs(by_name[f"layers.{name}"]).max() > 1e-3 for name in ("key", "value"))


def test_a_derivative_holds_part_of_the_logits_and_one_block_s_activations(monkeypatch):
    monkeypatch.setattr(loglikelihood, "LOGITS_BYTES", 4 * 2 * 64 * 4)  # four tokens of each row

    def arrays(jaxpr):
        """The last axis and the size of every array of a program and of those inside it."""
        for equation in jaxpr.eqns:
            yield from ((var.aval.shape[-1:], var.aval.size) for var in equation.outvars)
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
                if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                    yield from arrays(getattr(inner, "jaxpr", inner))

    def objective(parameters):
        return finetune.loss_of(models.Decoder(CONFIG, parameters), TEXT[:2], SETTINGS)

    found = list(arrays(jax.make_jaxpr(jax.grad(objective))(model().arrays()).jaxpr))
    assert max(size for last, size in found if last == (64,)) == 16 * 64  # the head; all logits would be 2 * 23 * 64
    assert max(size for last, size in found if last == (24,)) == 16 * 2 * 24  # E 2 F, a layer's weights; B T F is 1104


# --- LoRA ------------------------------------------------------------------------------------------------------------


def test_low_rank_matrices_add_their_product_to_each_projection_of_a_checkpoint(tmp_path):
    base, on = model(), lora.projections(CONFIG)
    pairs = lora.init(CONFIG, 2, on, seed=0)
    random = np.random.default_rng(2)
    pairs |= {name: random.normal(size=array.shape) for name, array in pairs.items() if name.endswith(".B")}
    tuned = finetune.model_of(base, pairs, SETTINGS.changed(lora=2))
    models.save(tmp_path / "base", base)
    models.save(tmp_path / "tuned", tuned)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "tuned"))
    names = dict(query="self_attn.q", key="self_attn.k", value="self_attn.v", output="self_attn.o") | {
        name: f"mlp.{name}" for name in ("gate", "up", "down")
    }
    for name, tensor in names.items():
        for layer in range(CONFIG.num_layers):
            full = f"model.layers.{layer}.{tensor}_proj.weight"
            product = 2 * pairs[f"{name}.B"][layer] @ np.asarray(pairs[f"{name}.A"][layer])
            np.testing.assert_allclose(after.pop(full), before.pop(full) + product, atol=1e-5, err_msg=name)
    assert all(np.array_equal(after[name], before[name]) for name in before)
    adapters.save(tmp_path / "adapter", CONFIG, pairs, base=str(tmp_path / "base"), scale=lora.SCALE)
    loaded, merged = (one.arrays() for one in (models.load(tmp_path / "adapter")[0], tuned))
    for name, array in merged.items():
        np.testing.assert_allclose(loaded[name], array, atol=1e-5, err_msg=name)


def test_low_rank_matrices_change_nothing_at_first_and_alone_are_trained():
    base, settings = model(), SETTINGS.changed(lora=2, lora_on=("query", "down"))
    state = finetune.init_state(base, settings)
    first = finetune.model_of(base, state.parameters, settings).arrays()
    assert all(np.array_equal(first[name], array) for name, array in base.arrays().items())
    assert sorted(state.parameters) == ["down.A", "down.B", "query.A", "query.B"]


# --- a run -----------------------------------------------------------------------------------------------------------


@matrix
def test_a_step_on_several_devices_is_the_step_on_one(tmp_path):
    models.save(tmp_path, model())
    settings, found = SETTINGS.changed(policy="tova"), []
    for mesh in (None, models.parse_mesh("data=2,tensor=2")):
        loaded, _ = models.load(tmp_path, mesh=mesh)
        rows = jnp.asarray(TEXT[:2]) if mesh is None else loop.spread(TEXT[:2], mesh)
        state, loss, norm = finetune.make_step(settings)(loaded, finetune.init_state(loaded, settings), rows, 0)
        found.append((float(loss), float(norm), np.asarray(state.parameters["layers.0.qkv"])))
    assert found[0][:2] == pytest.approx(found[1][:2], rel=1e-5)
    np.testing.assert_allclose(found[0][2], found[1][2], atol=1e-3)  # Adam's first step is lr times a sign
    assert len(state.parameters["layers.0.qkv"].sharding.device_set) == 4


@pytest.mark.bad_input
def test_all_weights_are_not_trained_in_half_precision(tmp_path):
    narrow = {name: array.astype(jnp.bfloat16) for name, array in reference.parameters(CONFIG).items()}
    with pytest.raises(ValueError, match="the model is in bfloat16, in which steps of the learning rate round"):
        finetune.train(tmp_path / "out", reference.decoder(CONFIG, narrow), None, corpus(TEXT), SETTINGS)


@pytest.mark.bad_input
def test_a_model_that_cannot_be_saved_is_refused_before_it_is_trained(tmp_path):
    config = dataclasses.replace(CONFIG, query_key_norm=True)
    with pytest.raises(ValueError, match="is written as a Llama, which cannot hold its query_key_norm"):
        finetune.train(tmp_path / "out", reference.decoder(config), None, corpus(TEXT), SETTINGS)


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small random model with a tokenizer, questions and text."""
    folder = tmp_path_factory.mktemp("finetune")
    tokenizer = models.Tokenizer.from_folder(Path(__file__).parents[1] / "models/golden/tokenizer")
    ends = dict(bos=tokenizer.bos, eos=(tokenizer.eos,) if tokenizer.eos is not None else (1,))
    config = models.Config(
        tokenizer.vocab_size, 16, 24, num_layers=1, num_heads=2, num_kv_heads=1, max_positions=64, **ends
    )
    models.save(folder / "base", reference.decoder(config), tokenizer)
    lines = [
        {"prompt": f"The code of the river is {number}. The code is", "answer": f" {number}"} for number in range(9)
    ]
    (folder / "qa.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def words(folder: Path, line: str) -> list[str]:
    return [word.format(folder) for word in line.split()]


FLAGS = "--model {0}/base --seq-len 48 --batch 2 --tokens 192 --block 16 --budget 16 --eval-rows 2 "


@pytest.mark.matrix
def test_the_command_lowers_the_loss_under_every_policy_and_its_model_loads(folder, capsys):
    line = FLAGS + "--data {0}/qa.jsonl --policy full --eval-policy full,tova --when prompt --out {0}/tuned"
    line += " --cache-dtype int8 --lora 2 --lora-on value,down --tokens 768 --lr 0.05 --eval-every 3"
    assert finetune.main(words(folder, line)) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-4].endswith("budget 16 slots per head, cache of int8")
    assert [row.split()[0] for row in printed[-3:]] == ["policy", "full", "tova"]
    summary = json.loads((folder / "tuned/summary.json").read_text())
    assert summary["held_out_rows"] == 2 and summary["settings"]["policy"] == "full"
    losses = summary["held_out_loss"]
    assert list(losses) == ["full", "tova"] and all(own["after"] < own["before"] for own in losses.values())
    lines = [json.loads(line) for line in (folder / "tuned/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "held_out/loss" in line] == [3, 6, 8]
    assert lines[-1]["summary/tova/after"] == losses["tova"]["after"]
    (base, words_of), (tuned, tokenizer) = (models.load(folder / name) for name in ("base", "tuned"))
    before, after = (split_weights(one.config, one.arrays()) for one in (base, tuned))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {"layers.value", "layers.down"} and not (folder / "tuned/model.safetensors").exists()
    assert tokenizer.encode("The code") == words_of.encode("The code")


@pytest.mark.parametrize(
    ("flags", "lr"), [("", 2e-5), ("--lora 8", 2e-4), ("--lora 8 --lr 3e-5", 3e-5), ("--lr 3e-5", 3e-5)]
)
def test_a_run_of_low_rank_matrices_has_ten_times_the_learning_rate_unless_one_is_given(flags, lr):
    assert finetune.settings_of(finetune.parser().parse_args(flags.split())).lr == pytest.approx(lr)


def test_the_model_that_is_trained_is_not_overwritten(folder, capsys):
    before = (folder / "base/model.safetensors").read_bytes()
    assert finetune.main(words(folder, FLAGS + "--data {0}/qa.jsonl --out {0}/base --resume never")) == 2
    assert "the folder of --model, which the run would overwrite" in capsys.readouterr().err
    assert (folder / "base/model.safetensors").read_bytes() == before


# --- rows of answers -------------------------------------------------------------------------------------------------


def test_rows_of_answers_are_the_prompt_the_answer_and_the_end_in_a_new_order_each_epoch(folder):
    _, tokenizer = models.load(folder / "base")
    data = answers.open_answers([str(folder / "qa.jsonl")], tokenizer, 48, eval_rows=2)
    fed = answers.model_batch(data.held_out)
    prompt = tokenizer.encode("The code of the river is 0. The code is")
    answer = [*tokenizer.encode(" 0", add_special_tokens=False), tokenizer.eos]
    assert fed.tokens[0, : fed.lengths[0] + 1].tolist() == [*prompt, *answer]
    assert fed.answers[0] == len(answer) == fed.learned[0].sum()
    line = {"prompt": "The code of the river is 0. The code is", "answer": " 0", "more": [["\nAgain:", " 0"]]}
    (folder / "more.jsonl").write_text(json.dumps(line))
    (row,) = answers.open_answers([str(folder / "qa.jsonl")], tokenizer, 48, eval_names=[str(folder / "more.jsonl")])[2]
    again = tokenizer.encode("\nAgain:", add_special_tokens=False)
    told = [*(~token for token in prompt), *answer[:-1], *(~token for token in again), *answer]
    assert row[: len(told)].tolist() == told and set(row[len(told) :]) <= {answers.PADDING}
    read = data.rows(None)
    first, second = ([next(read) for _ in range(7)] for _ in range(2))
    assert {row.tobytes() for row, _ in first} == {row.tobytes() for row, _ in second}
    assert [row.tobytes() for row, _ in first] != [row.tobytes() for row, _ in second]
    resumed = data.rows(first[3][1])
    assert all(np.array_equal(next(resumed)[0], row) for row, _ in [*first[4:], *second])


def test_answers_go_on_where_their_prompts_end(tmp_path):
    tokenizer, file = spaced(None), str(tmp_path / "prices.jsonl")
    Path(file).write_text(json.dumps({"prompt": "It costs $", "answer": "12", "more": [["34, then $", "5"]]}))
    (row,) = answers.open_answers([file], tokenizer, 48, eval_names=[file]).held_out
    tokens = answers.model_batch(row[None]).tokens[0].tolist()
    whole = [*tokenizer.encode("It costs $1234, then $5"), tokenizer.eos]
    assert tokens[: len(whole)] == whole
    learned = [tokenizer.backend.id_to_token(token) for token in row[row >= 0]]
    assert learned == ["<0x31>", "<0x32>", "<0x35>", "</s>"]
