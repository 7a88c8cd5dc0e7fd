"""Makes tests/models/golden/smollm2/expected.json: what transformers makes of the model that `make smollm2` fetches.

Run in make_golden.py's environment with gguf installed beside torch and transformers, from the repository's root:

    python -m tests.models.make_smollm2 FILE

FILE is what `python -m models.get smollm2` says it fetched. transformers reads the same file, dequantised to float32.
The passage, the prompts, the questions and the texts are those that expected.json has; all else is made again.
"""

import json
import sys
from pathlib import Path

from tests.models.make_kvpress import read_gguf

GOLDEN = Path(__file__).parent / "golden" / "smollm2" / "expected.json"
TOP = 64  # logits that are kept of a position
NEW_TOKENS = 24
GAP = 0.01  # between the best two logits of a step; a continuation ends before a tie, which rounding would decide


def main(file: Path) -> None:
    import torch
    import transformers
    from tokenizers import pre_tokenizers

    model, tokenizer = read_gguf(file, "eager")
    # The conversion leaves out what SmolLM2's own tokenizer.json has: each digit stands alone, before all else.
    backend = tokenizer.backend_tokenizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    expected = json.loads(GOLDEN.read_text())
    passage, questions, texts = (expected[name] for name in ("passage", "questions", "texts"))
    positions = [0, 7, len(passage) // 2, len(passage) - 1]
    with torch.no_grad():
        best = model(torch.tensor([passage])).logits[0, positions].topk(TOP)

    @torch.no_grad()
    def continued(ids: list[int]) -> list[int]:
        new: list[int] = []
        cache = transformers.DynamicCache()
        while len(new) < NEW_TOKENS and new[-1:] != [model.config.eos_token_id]:
            step = model(torch.tensor([new[-1:] or ids]), past_key_values=cache).logits[0, -1].topk(2)
            if step.values[0] - step.values[1] < GAP:
                break
            new.append(int(step.indices[0]))
        return new

    chats = [[{"role": "user", "content": question}] for question in questions]
    chat_texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    prompts = [*expected["prompts"][: -len(questions)], *chat_texts]
    expected |= {
        "positions": positions,
        "top_ids": best.indices.tolist(),
        "top_logits": [[round(value, 5) for value in row] for row in best.values.tolist()],
        "prompts": prompts,
        "prompt_ids": [encode(prompt) for prompt in prompts],
        "continuations": [continued(encode(prompt)) for prompt in prompts],
        "chat_texts": chat_texts,
        "token_ids": [encode(text) for text in texts],
    }
    GOLDEN.write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
