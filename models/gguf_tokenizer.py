"""The tokenizer of a GGUF file, from its metadata.

Its "add_bos_token" and "add_eos_token" say what is put around a text, as in llama.cpp and transformers 5; a
tokenizer.json beside it says so itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from models import added_tokens
from models.config import Config
from models.gguf_header import listed, optional
from models.tokenizer import Tokenizer

# Types of tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
LETTERS, MARKED = r"\p{L}+", r"[\p{L}\p{M}]+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}"
# The patterns by which each pre-tokenizer splits a text, one after the other.
SPLITS = {
    "default": (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (GPT2,),
    "llama-bpe": (rf"{WORD}|\p{{N}}{{1,3}}|{REST}",),
    "qwen2": (rf"{WORD}|\p{{N}}|{REST}",),
    "smollm": (r"\p{N}", GPT2),
    "gpt-4o": (rf"{CASED}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",),  # Phi-4-mini's
    "qwen35": (
        rf"{WORD.replace(LETTERS, MARKED)}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        rf"[!-/:-@\[-`{{-~][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?{MARKED}| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ),
}
SPLITS["glm4"] = SPLITS["llama-bpe"]
SPLITS["dbrx"] = SPLITS["llama-bpe"]  # OLMo-2's
SPLITS["refact"] = SPLITS["smollm"]  # Granite's
SPACE = "▁"  # SentencePiece's
PRE = "tokenizer.ggml.pre"  # names the pre-tokenizer
# Tokens that end a turn, for older files that name only the end of a text: as in llama.cpp, they are control tokens
# whatever their type is.
ENDS_OF_TURN = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<EOT>",
    "[EOT]", "<end_of_utterance>", "<turn|>",
)  # fmt: skip
# Special tokens of Phi-3's SentencePiece vocabulary that keep the blanks behind them; the others take them in.
KEEP_BLANKS = ("<unk>", "<s>", "<|endoftext|>")


def tokenizer_of(metadata: Mapping[str, Any], config: Config, file: Path) -> Tokenizer | None:
    beside = file.parent / "tokenizer.json"
    kind = optional(metadata, "tokenizer.ggml.model", str, "none")
    if kind not in ("gpt2", "llama", "gemma4", "none", "no_vocab") and not beside.is_file():
        raise ValueError(
            f"its tokenizer is of the kind {kind!r}, but only gpt2 (BPE), llama (SentencePiece) and gemma4 are read; "
            "put the model's tokenizer.json beside the file, which is then used."
        )
    tokens = listed(metadata, "tokenizer.ggml.tokens", str)
    if len(tokens) > config.vocab_size:
        raise ValueError(
            f"it has {len(tokens)} tokens and embeddings for {config.vocab_size}; is it complete? Download it again."
        )
    ids = {"bos_token": config.bos, "eos_token": id_of(metadata, "eos"), "pad_token": config.pad}
    ids["unk_token"] = id_of(metadata, "unknown")
    special = {name: tokens[index] for name, index in ids.items() if index is not None and index < len(tokens)}
    template = optional(metadata, "tokenizer.chat_template", str, None)
    if beside.is_file():
        own = Tokenizer.from_folder(file.parent)
        said = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
        added_tokens.warn_of_surroundings(own.backend, {"bos": own.bos, "eos": own.eos}, said, str(file))
        return Tokenizer(own.backend, special | own.special_tokens, own.chat_template or template)
    if kind in ("none", "no_vocab"):
        return None
    if not tokens:
        raise ValueError("it lacks the key tokenizer.ggml.tokens (a list); put the model's tokenizer.json beside it.")
    types = _types(metadata, tokens)
    if len(types) != len(tokens):
        raise ValueError(f"it has {len(tokens)} tokens and the types of {len(types)}; download it again.")
    if kind == "gpt2" and not metadata.get(PRE):
        warnings.warn(
            f"{file} does not name its pre-tokenizer ({PRE}), so texts are split by the one called 'default', as in "
            "llama.cpp, and the model may have learned others' tokens; put the model's tokenizer.json beside the file, "
            "which is then used, or take a newer file.",
            stacklevel=2,
        )
    make = _byte_level if kind == "gpt2" else _sentencepiece
    backend = make(metadata, tokens, types, special.get("unk_token"))
    blanks = kind == "llama" and _is_phi3(metadata)
    added = [
        tokenizers.AddedToken(
            token, special=type_ != USER_DEFINED, normalized=False, rstrip=blanks and token not in KEEP_BLANKS
        )
        for token, type_ in zip(tokens, types, strict=True)
        if token and type_ in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    backend.add_tokens(added)
    _surround(backend, metadata, config, tokens, by_default=kind == "llama" or _pre_tokenizer(metadata) == "llama-bpe")
    return Tokenizer(backend, special, template)


def _byte_level(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], unknown: str | None
) -> tokenizers.Tokenizer:
    """Build a BPE tokenizer over bytes, as GPT-2's."""
    name = _pre_tokenizer(metadata)
    if name not in SPLITS:
        raise ValueError(
            f"its pre-tokenizer is {name!r}, but only {', '.join(SPLITS)} are read; put the model's tokenizer.json "
            "beside the file, which is then used."
        )
    merges = _merges(metadata)
    # Unused ids have texts such as [PAD7], which must not be matched in a text.
    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] != UNUSED}
    backend = _bpe(vocabulary, merges, ignore_merges=name == "llama-bpe")
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in SPLITS[name]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = listed(metadata, "tokenizer.ggml.merges", str)
    # The space between the two parts is never the first character.
    return [(pair[:at], pair[at + 1 :]) for pair in pairs if (at := pair.find(" ", 1)) > 0]


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], unknown: str | None
) -> tokenizers.Tokenizer:
    """Build a SentencePiece BPE tokenizer, as Llama 2's: the pair whose joint token scores best is joined first.

    Gemma 4's file has the pairs in their order.
    """
    scores, merges = listed(metadata, "tokenizer.ggml.scores", float), _merges(metadata)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if not merges:
        if len(scores) != len(tokens):
            raise ValueError(f"it has {len(tokens)} tokens and the scores of {len(scores)}; download it again.")
        joint = [index for index, kind in enumerate(types) if kind in (NORMAL, USER_DEFINED, UNUSED)]
        merges = [
            (tokens[index][:at], tokens[index][at:])
            for index in sorted(joint, key=lambda index: -scores[index])
            for at in range(1, len(tokens[index]))
            if tokens[index][:at] in vocabulary and tokens[index][at:] in vocabulary
        ]
    backend = _bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefixed = optional(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
    backend.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(SPACE)] if prefixed else []), normalizers.Replace(" ", SPACE)]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefixed else []),
        ]
    )
    return backend


def _bpe(vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(tokenizers.models.BPE(dict(vocabulary), list(merges), **options))
    except Exception as error:  # the library raises nothing narrower
        reason = " ".join(str(error).split())
        raise ValueError(f"its tokens and merges do not form a tokenizer ({reason}); download it again.") from None


def _surround(
    backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], config: Config, tokens: Sequence[str], by_default: bool
) -> None:
    """Add BOS before a text and EOS after it if the file says so."""
    parts: list[str] = ["$A"]
    used = []
    for name, index, default in (("bos", config.bos, by_default), ("eos", id_of(metadata, "eos"), False)):
        key = f"tokenizer.ggml.add_{name}_token"
        if not optional(metadata, key, bool, default and index is not None):
            continue
        if index is None or index >= len(tokens):
            raise ValueError(f"its key {key} is true, and there is no such token; download it again.")
        used.append((tokens[index], index))
        parts = [tokens[index], *parts] if name == "bos" else [*parts, tokens[index]]
    if used:
        second = [part.replace("$A", "$B") for part in parts]
        backend.post_processor = processors.TemplateProcessing(
            single=parts, pair=[*parts, *second], special_tokens=used
        )


def _pre_tokenizer(metadata: Mapping[str, Any]) -> str:
    return optional(metadata, PRE, str, "default") or "default"


def _types(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[int]:
    """Return the types of tokens; those that end a text or a turn are control tokens."""
    types = listed(metadata, "tokenizer.ggml.token_type", int) or [NORMAL] * len(tokens)
    ends = {id_of(metadata, name) for name in ("eos", "eot", "eom")}
    ends |= {index for index, token in enumerate(tokens) if token in ENDS_OF_TURN}
    return [CONTROL if index in ends else kind for index, kind in enumerate(types)]


def _is_phi3(metadata: Mapping[str, Any]) -> bool:
    """Return whether a model is a Phi-3, by its architecture or, as in llama.cpp, its name."""
    name = optional(metadata, "general.name", str, "").lower()
    return metadata.get("general.architecture") == "phi3" or "phi-3" in name or "phi3" in name


def ends_of_turn(metadata: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a turn in the chat template."""
    template = optional(metadata, "tokenizer.chat_template", str, "")
    used = [text for text in ENDS_OF_TURN if text in template]
    return [index for index, token in enumerate(listed(metadata, "tokenizer.ggml.tokens", str)) if token in used]


def id_of(metadata: Mapping[str, Any], name: str) -> int | None:
    """Return the id of a special token; None without one, which a file may also mark by an id out of range."""
    index = optional(metadata, f"tokenizer.ggml.{name}_token_id", int, None)
    return None if index is None or not 0 <= index < 2**31 - 1 else index
