"""Makes docs/results/kvpress-answers.json: what presses of kvpress keep of the texts of "once", and answer, beside us.

Two environments take turns with a FOLDER, from the repository's root:

    python -m tests.models.make_smollm2_answers FOLDER prompts    in this project's: the prompts, and both models
    python -m tests.models.make_smollm2_answers FOLDER presses    in make_kvpress.py's: a file per model and prompt
    python -m tests.models.make_smollm2_answers FOLDER policies   in this project's: likewise, of what stays here
    python -m tests.models.make_smollm2_answers FOLDER compare    in this project's: the texts that have all files

A prompt takes half a minute of a CPU core; the second and the third step resume. Our answers are those of the study
(docs/results/once.json), whose policies are the same methods with the same settings.
"""

import copy
import itertools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.make_kvpress import Press, make_press

ANSWERS = Path(__file__).parents[2] / "docs" / "results" / "kvpress-answers.json"
# The policy of the study, and the press.
PRESSES: dict[str, Press] = json.loads((Path(__file__).parent / "golden/smollm2/presses.json").read_text())
REPEATS = "kvzip"  # KVzipPress feeds a prompt again, so that only a sixth of the texts have it
THIRDS, SIXTHS, BATCH = 3, 6, 6
FINCH = 32  # the window that our finch has by default

Compressed = tuple[Any, list[Any]]  # a cache, and the keys that are masked in each layer, or None


def model_names(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("*/config.json"))


def file(folder: Path, name: str, prompt: dict[str, Any], side: str) -> Path:
    return folder / f"{name}-{prompt['question']}-{prompt['text']}-{side}.npz"


def write_prompts(folder: Path) -> None:
    """Write both models, and the study's prompts as tokens; known questions have prompts of their own, one a text.

    A third of the texts comes before the next third, so that a run that ends early has seen all depths.
    """
    import models
    from evals import needle, studies, sweep
    from kvjax._src.selection import share_of_tokens
    from models.loading import describe
    from models.repeating import FIRST, repeat_prompt

    found, (config, tokenizer) = studies.find("once"), describe("smollm2")
    prompts: list[dict[str, Any]] = []
    for question in ("unknown", "known"):
        part = sweep.plan({**found.content, "models": ["smollm2"], "question": [question]})[0]
        (group,) = needle.make_groups(part.flags, config, tokenizer)
        (budget,) = {setting.budget for setting in part.settings if setting.budget is not None}
        for text, of_text in enumerate(itertools.batched(enumerate(group.draw()), found.asked)):
            asked = of_text if question == "unknown" else [of_text[text % found.asked]]
            first = asked[0][1]
            end = first.context_end if question == "unknown" else len(first.tokens)
            prompts.append({
                "text": text,
                "question": question,
                "repeats": question == "unknown" and text % SIXTHS == 0,
                "tokens": list(map(int, first.tokens[:end])),
                "kept": share_of_tokens(budget, end),
                "samples": [number for number, _ in asked],
                "questions": [list(map(int, sample.tokens[end:])) for _, sample in asked],
                "answers": [list(map(int, sample.answer_tokens)) for _, sample in asked],
            })  # fmt: skip
    prompts.sort(key=lambda prompt: (prompt["text"] % THIRDS, prompt["text"]))
    words = repeat_prompt(tokenizer)
    given = {"words": {FIRST: words.first, "\n": words.suffix}, "prompts": prompts}
    (folder / "prompts.json").write_text(json.dumps(given))
    for name in found.forms["base"] + found.forms["adapted"]:
        models.save(folder / name, models.load(name, dtype="float32")[0], tokenizer)


def read_by_each(model: Any, tokens: Any, presses: dict[str, Any]) -> tuple[Any, Any, dict[str, Compressed]]:
    """Feed a prompt once, and return the last token's logits, the full cache, and what each press makes of it.

    A press shortens a layer's cache after that layer has attended, so that all can follow one run, each with a copy.
    """
    from transformers import DynamicCache

    full, each = DynamicCache(), {name: (DynamicCache(), []) for name in presses}

    def compress(module: Any, positional: Any, given: dict[str, Any], output: Any) -> None:
        layer = full.layers[module.layer_idx]
        for name, press in presses.items():
            own, masked = each[name]
            own.update(layer.keys.clone(), layer.values.clone(), module.layer_idx)
            press.forward_hook(module, positional, given | {"past_key_values": own}, output)
            masked.append(module.masked_key_indices)
            module.masked_key_indices = None

    for press in presses.values():
        press.post_init_from_model(model)
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
    hooks = [layer.self_attn.register_forward_hook(compress, with_kwargs=True) for layer in model.model.layers]
    logits = model(tokens, past_key_values=full, logits_to_keep=1).logits[0, -1]
    for hook in hooks:
        hook.remove()
    return logits, full, each


def repeated(model: Any, tokens: Any, full: Any, kept: int) -> list[Any]:
    """Return the keys that KVzip masks in the cache that the prompt has left, which it feeds again."""
    from tests.models.make_kvzip import REAL, Words, press_of

    press = press_of(REAL, Words(), compression_ratio=(tokens.shape[1] - kept + 1e-7) / tokens.shape[1])
    press.chunk_size = 2048  # KVzip's own, and ours
    with press(model):
        press._context_ids, press._cache = tokens, full
    return [layer.self_attn.masked_key_indices for layer in model.model.layers]


def positions(full: Any, own: Any, masked: list[Any]) -> np.ndarray:
    """Return the positions that stay, bool [L, K, T]; a key is known by the bits of its first two numbers."""
    import torch

    masks = []
    for layer, left, free in zip(full.layers, own.layers, masked, strict=True):
        before, after = (keys[0, :, :, :2].contiguous().view(torch.int64)[..., 0] for keys in (layer.keys, left.keys))
        mask = torch.stack([torch.isin(*heads) for heads in zip(before, after, strict=True)])
        assert (mask.sum(-1) == after.shape[1]).all(), "two positions have the same key"
        if free is not None:
            mask[free[1], free[2]] = False
        masks.append(mask)
    return torch.stack(masks).numpy()


def right(model: Any, prompt: dict[str, Any], said: int, compressed: Any, masked: list[Any]) -> str:
    """Return a digit for each question: 1 if each token of its answer is the likeliest behind the others.

    ``said`` is the token that the model says behind the prompt.
    """
    import torch

    assert len({layer.get_seq_length() for layer in compressed.layers}) == 1, "transformers has one mask for all layers"
    found = ""
    for question, answer in zip(prompt["questions"], prompt["answers"], strict=True):
        fed = question + answer[:-1]
        at = torch.arange(len(fed))[None] + len(prompt["tokens"])
        for layer, free in zip(model.model.layers, masked, strict=True):
            layer.self_attn.masked_key_indices = free
        read = model.model(torch.tensor([fed]), past_key_values=copy.deepcopy(compressed), position_ids=at)
        behind = model.lm_head(read.last_hidden_state[0, max(len(question) - 1, 0) :]).argmax(-1).tolist()
        found += str(int((behind if question else [said, *behind])[: len(answer)] == answer))
    return found


def run_presses(folder: Path) -> None:
    """Answer the prompts under each press, and write a file per model and prompt: answers and positions that stay."""
    import torch
    import transformers

    from tests.models import make_kvzip

    torch.set_grad_enabled(False)
    transformers.utils.logging.disable_progress_bar()
    given = json.loads((folder / "prompts.json").read_text())
    make_kvzip.WORDS.update(given["words"])
    settings: dict[str, Any] = dict(dtype=torch.float32, attn_implementation="sdpa")
    load = transformers.AutoModelForCausalLM.from_pretrained
    loaded = {name: load(folder / name, **settings).eval() for name in model_names(folder)}
    versions = {package: version(package) for package in ("kvpress", "transformers", "torch")}
    for prompt, (name, model) in itertools.product(given["prompts"], loaded.items()):
        path = file(folder, name, prompt, "theirs")
        if path.exists():
            continue
        tokens, kept = torch.tensor([prompt["tokens"]]), prompt["kept"]
        presses = {policy: make_press(press, model, tokens, kept) for policy, press in PRESSES.items()}
        presses["finch"].window_size = FINCH
        logits, full, each = read_by_each(model, tokens, presses)
        if prompt["repeats"]:
            each[REPEATS] = full, repeated(model, tokens, full, kept)
        stay = {policy: np.packbits(positions(full, *of_press), axis=-1) for policy, of_press in each.items()}
        each["full"], said = (full, [None] * len(full.layers)), int(logits.argmax())
        answers = {policy: right(model, prompt, said, *of_press) for policy, of_press in each.items()}
        np.savez_compressed(path, told=json.dumps({"answers": answers, "versions": versions}), **stay)
        print(path.stem, flush=True)


def run_policies(folder: Path) -> None:
    """Write the positions that stay under each policy, as :func:`run_presses` does, in batches of one width."""
    import models
    from tests.models.tiny import kept_tokens

    prompts = json.loads((folder / "prompts.json").read_text())["prompts"]
    width = max(len(prompt["tokens"]) for prompt in prompts)
    loaded = {name: models.load(name, dtype="float32") for name in model_names(folder)}

    def kept(model: Any, some: Sequence[dict[str, Any]], policies: Sequence[Any]) -> Iterator[np.ndarray]:
        tokens = np.array([prompt["tokens"] + [0] * (width - len(prompt["tokens"])) for prompt in some])
        given = dict(lengths=np.array([len(prompt["tokens"]) for prompt in some]), policies=policies, budget=0.25)
        return (kept_tokens(cache, width) for cache, _ in models.prefill_each(model, tokens, **given))

    for batch, (name, (model, tokenizer)) in itertools.product(itertools.batched(prompts, BATCH), loaded.items()):
        paths = [file(folder, name, prompt, "ours") for prompt in batch]
        if all(path.exists() for path in paths):
            continue
        masks = zip(*(mask.swapaxes(0, 1) for mask in kept(model, batch, list(PRESSES))), strict=True)
        for path, prompt, of_prompt in zip(paths, batch, masks, strict=True):
            stay = dict(zip(PRESSES, of_prompt, strict=True))
            if prompt["repeats"]:
                stay[REPEATS] = next(kept(model, [prompt], [models.with_repeat_prompt(REPEATS, tokenizer)]))[:, 0]
            stay = {policy: mask[..., : len(prompt["tokens"])] for policy, mask in stay.items()}
            assert (stay["tova"].sum(-1) == prompt["kept"]).all()
            np.savez_compressed(path, **{policy: np.packbits(mask, axis=-1) for policy, mask in stay.items()})
            print(path.stem, flush=True)


def overlap(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the share of each row of two masks that both have, of the row that has more."""
    both, either = (found & expected).sum(axis=-1), np.maximum(found.sum(axis=-1), expected.sum(axis=-1))
    return np.where(either > 0, both / np.maximum(either, 1), 1.0)


def compared(folder: Path, name: str, prompts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the answers under each press to one model's prompts, and how many kept sets are equal, how far alike."""
    answers: dict[str, str] = dict.fromkeys(("full", *PRESSES, REPEATS), "")
    shares: dict[str, list[np.ndarray]] = {}
    for prompt in prompts:
        ours, theirs = (np.load(file(folder, name, prompt, side)) for side in ("ours", "theirs"))
        told = json.loads(str(theirs["told"]))
        for policy in answers:
            answers[policy] += told["answers"].get(policy, "-" * len(prompt["samples"]))
        for policy in ours.files:
            sides = (np.unpackbits(side[policy], axis=-1, count=len(prompt["tokens"])) for side in (ours, theirs))
            shares.setdefault(policy, []).append(overlap(*(side.astype(bool) for side in sides)))
    every = {policy: np.stack(of_policy) for policy, of_policy in shares.items()}
    kept = {
        policy: {"sets": each.size, "equal": int((each == 1).sum()), "alike": round(float(each.mean()), 5)}
        for policy, each in every.items()
    }
    samples = [sample for prompt in prompts for sample in prompt["samples"]]
    return {"samples": samples, "answers": answers, "kept": kept, "versions": told["versions"]}


def compare(folder: Path) -> None:
    """Write the JSON file: a result for each model and question, of the texts that have all files."""
    from models.commands import provenance

    prompts, names = json.loads((folder / "prompts.json").read_text())["prompts"], model_names(folder)
    wanted = list(itertools.product(names, prompts, ("ours", "theirs")))
    begun = {prompt["text"] for name, prompt, side in wanted if not file(folder, name, prompt, side).exists()}
    results = []
    for name, question in itertools.product(names, ("unknown", "known")):
        some = [prompt for prompt in prompts if prompt["question"] == question and prompt["text"] not in begun]
        found = compared(folder, name, sorted(some, key=lambda prompt: prompt["text"]))
        versions = found.pop("versions")
        results.append({"model": name, "question": question, **found})
    made = {"command": "python -m tests.models.make_smollm2_answers FOLDER compare", **provenance.environment()}
    made["versions"] |= versions
    text = json.dumps({**made, "results": results}, indent=1)
    text = re.sub(r"\[[\d,\s]+\]|\{[^{}]*\"sets\"[^{}]*\}", lambda found: " ".join(found[0].split()), text)
    ANSWERS.write_text(text + "\n")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    steps = {"prompts": write_prompts, "presses": run_presses, "policies": run_policies, "compare": compare}
    steps[sys.argv[2]](folder)
