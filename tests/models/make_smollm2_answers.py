"""Makes docs/results/kvpress-answers.json: the questions of the study "once" answered under kvpress' presses.

The texts are compressed before their questions are known. Two environments take turns, from the repository's root:

    python -m tests.models.make_smollm2_answers prompts.json          in this project's: writes every third prompt
    python -m tests.models.make_smollm2_answers prompts.json FILE     in make_kvpress.py's, with gguf: answers them

FILE is what `python -m models.get smollm2` says it fetched. A press takes a minute on a GPU, and 15 on two CPU cores.
docs/tables.py sets the answers beside those of kvjax (docs/results/once.json), whose policies are the same methods with
the same settings.
"""

import copy
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.models.make_kvpress import Press, make_press, read_gguf

ANSWERS = Path(__file__).parents[2] / "docs" / "results" / "kvpress-answers.json"
EVERY = 3  # of the study's texts
# The policy of the study, and the press.
PRESSES: dict[str, Press] = json.loads((Path(__file__).parent / "golden/smollm2/presses.json").read_text())


def write_prompts(path: Path) -> None:
    """Write the texts, what is kept of each, their questions and their answers, as tokens."""
    from evals import needle, studies, sweep
    from kvjax.selection import share_of_tokens
    from models.load import describe

    (part,) = sweep.plan({**studies.find("once").content, "models": ["smollm2"], "question": ["unknown"]})
    config, tokenizer = describe("smollm2")
    (group,) = needle.make_groups(part.flags, config, tokenizer)
    (budget,) = {setting.budget for setting in part.settings if setting.budget is not None}
    rows: list[dict[str, Any]] = []
    for sample in group.draw():
        tokens = list(map(int, sample.tokens))
        text, question = tokens[: sample.context_end], tokens[sample.context_end :]
        if not rows or rows[-1]["text"] != text:
            rows.append({"text": text, "kept": share_of_tokens(budget, len(text)), "questions": [], "answers": []})
        rows[-1]["questions"].append(question)
        rows[-1]["answers"].append(list(map(int, sample.answer_tokens)))
    path.write_text(json.dumps(rows[::EVERY]))
    print(f"{len(rows[::EVERY])} texts: {path}")


def answers(model: Any, row: dict[str, Any], press: Press | None) -> str:
    """Answer the questions about one text, and return a digit for each: 1 if the answer is right."""
    import contextlib

    import torch
    from transformers import DynamicCache

    text, found = torch.tensor([row["text"]]), ""
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    compressed, kept = DynamicCache(), contextlib.nullcontext()
    if press is not None:
        kept = make_press(press, model, text, row["kept"])(model)
    with torch.no_grad(), kept:
        model(text, past_key_values=compressed, logits_to_keep=1)
    masked = [layer.self_attn.masked_key_indices for layer in model.model.layers]
    for question, answer in zip(row["questions"], row["answers"], strict=True):
        cache, tokens, said, place = copy.deepcopy(compressed), question, [], text.shape[1]
        for layer, of_layer in zip(model.model.layers, masked, strict=True):
            layer.self_attn.masked_key_indices = of_layer
        while len(said) < len(answer):
            positions = torch.arange(place, place + len(tokens))[None]
            with torch.no_grad():
                logits = model(torch.tensor([tokens]), past_key_values=cache, position_ids=positions).logits
            place += len(tokens)
            tokens = [int(logits[0, -1].argmax())]
            said += tokens
        found += str(int(said == answer))
    return found


def main(prompts: Path, file: Path) -> None:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_device(device)
    model = read_gguf(file, "sdpa")[0].to(device)
    rows = json.loads(prompts.read_text())
    made: dict[str, Any] = {"versions": {name: version(name) for name in ("kvpress", "transformers", "torch")}}
    made |= {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "every": EVERY}
    made["answers"] = {}
    for policy, press in {"full": None, **PRESSES}.items():
        found = [answers(model, row, press) for row in rows]
        made["answers"][policy] = "".join(found)
        print(policy, f"{made['answers'][policy].count('1')} of {len(made['answers'][policy])}", flush=True)
        ANSWERS.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        write_prompts(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
