"""Tokens that a tokenizer.json lacks and the files beside it name. They are added as transformers 5 adds them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
Token = str | Mapping[str, Any]  # its text, or the fields of a `tokenizers.AddedToken`


def companions(
    config: Mapping[str, Any], special: Mapping[str, Any], added: Mapping[str, int]
) -> tuple[dict[str, Any], dict[int, Mapping[str, Any]]]:
    """Join the contents of :data:`COMPANIONS` into a config, and tokens by their ids.

    A config with "added_tokens_decoder" says all that the other two said in older folders.
    """
    if "added_tokens_decoder" in config:
        return dict(config), {int(index): token for index, token in config["added_tokens_decoder"].items()}
    config = {**config, **special}
    named, others = special_tokens(config)
    texts = {text_of(token) for token in (*named.values(), *others)}
    return config, {
        index: {"content": text, "special": text in texts, "normalized": text not in texts}
        for text, index in added.items()
    }


def special_tokens(config: Mapping[str, Any]) -> tuple[dict[str, Token], list[Token]]:
    """Return the special tokens that a config names ("eos_token", but "image_token", too), and those without names."""
    named = {
        name: token
        for name, token in config.items()
        if token and (name in SPECIAL or (name.endswith("_token") and isinstance(token, str | Mapping)))
    }
    others = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(others, Mapping):
        return {**named, **{name: token for name, token in others.items() if token}}, []
    if not isinstance(others, list):
        raise TypeError("special tokens are a list")
    return named, others


def text_of(token: Token) -> str:
    """Return a token's text."""
    return token if isinstance(token, str) else str(token["content"])


def add_tokens(backend: tokenizers.Tokenizer, added: Mapping[int, Mapping[str, Any]], special: Iterable[Token]) -> None:
    """Add tokens, those with ids in their order, and make ``special`` ones special, which are not printed.

    Special tokens are found before a text is normalised: behind a letter, a normaliser that puts a blank before a text
    would hide them, as tokenizer.json has it in old folders of Llama's.

    Raises:
        TypeError, KeyError: a token is described in another way.
    """
    held = {token.content: token.__getstate__() for token in backend.get_added_tokens_decoder().values()}
    told: dict[str, Mapping[str, Any]] = held | {text_of(token): token for _, token in sorted(added.items())}
    for token in special:
        text = text_of(token)
        own = {"content": text} if isinstance(token, str) else {k: v for k, v in token.items() if k != "__type"}
        told[text] = {**told.get(text, own), "special": True}
    told = {text: {**token, "normalized": False} if token.get("special") else token for text, token in told.items()}
    backend.add_tokens([tokenizers.AddedToken(**token) for text, token in told.items() if token != held.get(text)])


def check_ids(backend: tokenizers.Tokenizer, added: Mapping[int, Mapping[str, Any]], folder: Path) -> None:
    """Check that tokens have the ids that their file gives them: the model's embeddings are in that order."""
    for index, token in added.items():
        if (found := backend.token_to_id(text_of(token))) != index:
            raise ValueError(f"{folder}: the token {text_of(token)!r} is {index}, but {found} in tokenizer.json.")


def warn_of_surroundings(
    backend: tokenizers.Tokenizer, ids: Mapping[str, int | None], said: Mapping[str, Any], where: str
) -> None:
    """Warn where "add_bos_token" or "add_eos_token" says other than a tokenizer.json, which counts."""
    around = backend.encode("").ids
    for name, index in ids.items():
        flag = said.get(f"add_{name}_token")
        if isinstance(flag, bool) and index is not None and flag != (index in around):
            warnings.warn(
                f"{where} says that add_{name}_token is {str(flag).lower()}, but tokenizer.json "
                f"{'puts none around' if flag else 'puts one around'} a text; tokenizer.json is followed, as by "
                "transformers 5.",
                stacklevel=2,
            )
