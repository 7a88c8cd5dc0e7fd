"""RestoreKV (arXiv 2608.01247): before a text's tokens leave, a few learned ones read all of it, and stay.

They go through the model once, behind the whole text and with an adapter of their own, and take slots of the same
budget; what a score such as KVzip's chooses of the text fills the others.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Unpack

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Int

import kvjax
from kvjax._src.chains import policy_of
from kvjax._src.checks import check_count
from kvjax._src.reconstruction import NO_WORDS
from kvjax._src.split_cache import ModelCache
from kvjax.schedule import HostOrDevice
from models import engine, loading, states
from models.checkpoint import opened
from models.decoder import Decoder
from models.folders import find_folder
from models.options import Options, PromptSettings, options_of
from models.prompts import Tokens, check_prompt
from models.repeating import asking

FILE, TENSOR = "restore_embeddings.safetensors", "restore_embeddings"
KVZIP = "kvzip"  # what scores where nothing else is named


def load_restorer(folder: str | Path, *, dtype: DTypeLike | None = None) -> Decoder:
    """Load restore tokens and their adapter, as their authors publish them.

    Args:
        folder: a LoRA adapter in PEFT's files with restore_embeddings.safetensors [R, E] beside it, or its name on the
            Hugging Face hub, such as "higokri/RestoreKV-Qwen3-8B". The base model that it names is loaded, too.
        dtype: that of the weights; give the dtype that the model has.

    Returns:
        The base model with the adapter, whose vocabulary are the R restore tokens.

    Raises:
        FileNotFoundError, ValueError: see :func:`models.load`; or the tokens are missing, damaged or of another width.

    Example:
        >>> import models
        >>> models.load_restorer("retriever")
        Traceback (most recent call last):
        ...
        FileNotFoundError: retriever has no restore_embeddings.safetensors; give a folder with both.
    """
    place = find_folder(folder) / FILE
    if not place.is_file():
        raise FileNotFoundError(f"{folder} has no {FILE}; give a folder with both.")
    with opened(place) as held:
        tokens = held.get_tensor(TENSOR) if TENSOR in held.keys() else None  # noqa: SIM118  it is no dict
    adapted, _ = loading.load(folder, dtype=dtype)
    width = adapted.config.hidden_size
    if tokens is None or tokens.ndim != 2 or tokens.shape[1] != width or not np.isfinite(tokens.astype(float)).all():
        found = "none" if tokens is None else f"{tokens.shape}"
        raise ValueError(f"{place} holds {TENSOR} {found}; expected finite numbers [R, {width}].")
    config = dataclasses.replace(adapted.config, vocab_size=len(tokens), tie_embeddings=True)
    arrays = {path: array for path, array in adapted.arrays().items() if path != "head"}
    dtype = adapted.embedding[...].dtype
    return Decoder(config, arrays | {"embedding": jnp.asarray(tokens.astype(np.float32)).astype(dtype)})


def prefill_restored(
    model: Decoder,
    restorer: Decoder,
    tokens: Tokens,
    *,
    lengths: Int[HostOrDevice, "B"] | None = None,
    options: Options | None = None,
    **settings: Unpack[PromptSettings],
) -> ModelCache:
    """Read a text whole, let the restore tokens read the cache, and keep them and the best of the text.

    The tokens that follow, of :func:`models.ask` or :func:`models.generate`, have positions behind the restore tokens'.
    At most the cache holds the whole text.

    Args:
        restorer: that of :func:`load_restorer`, for this model.
        tokens, lengths: see :func:`models.prefill`.
        options, settings: see :class:`Options`. The policy scores the text's tokens: KVzip by default, as published;
            ``kvzip(normalise=True)`` makes RestoreKV+. The budget is a number of slots, in the mean where heads share
            them, with the R restore tokens among them. It evicts once, whatever ``when`` says.

    Raises:
        ValueError: the budget has no room for more than the restore tokens, or what :func:`models.prefill` refuses.

    Example:
        >>> import dataclasses, models
        >>> model = models.Decoder.tiny()
        >>> few = dataclasses.replace(model.config, vocab_size=3)
        >>> arrays = model.arrays() | {"embedding": model.embedding[:3]}
        >>> restorer = models.Decoder(few, arrays)  # not trained
        >>> cache = models.prefill_restored(
        ...     model, restorer, [range(40)], policy="tova", budget=16, block=8
        ... )
        >>> cache.next_position.tolist(), float(cache.num_live.mean())
        ([43], 16.0)
    """
    R = restorer.config.vocab_size
    options = options_of("prefill_restored", PromptSettings, options, settings, when="prompt", evict_every=0)
    budget = check_count("budget", options.budget, R + 1, f"the {R} restore tokens take {R} of its slots")
    scored = policy_of(KVZIP if options.policy is None else options.policy)
    if scored is None:
        raise ValueError("the policy is full, which keeps all; give one that scores the text's tokens, such as kvzip.")
    policy = kvjax.chain(scored, kvjax.protect(recent=R))
    rows = check_prompt(model, tokens, lengths, None).text.lengths
    whole = dataclasses.replace(options, policy=policy, budget=max(budget, int(rows.max())))
    cache = engine.prefill(model, tokens, lengths=lengths, options=whole).cache
    behind = np.tile(np.arange(R, dtype=np.int32), (len(rows), 1))
    if policy.needs.reconstruction is not None:  # the restore tokens stay whatever they score: no words ask for them
        policy = asking(policy, NO_WORDS)
    least = dataclasses.replace(options, policy=policy, budget=budget)
    return states.without_room(engine.prefill(restorer, behind, cache=cache, options=least).cache)
