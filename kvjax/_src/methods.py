"""Methods made of several parts: a base score, links and an allocation, under the name of the paper that joins them.

A method is a base score like any other: links may follow it, and ``@`` gives it another allocation. ``gate``,
``repeat`` and ``window`` name what this library's own measurements recommend, for those who do not choose papers.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from kvjax import allocation
from kvjax._src.chains import chain, register
from kvjax._src.policy import Policy, Timing
from kvjax._src.scores import h2o, kvzip, snapkv, zap
from kvjax._src.scores_of_last_queries import defensive
from kvjax._src.transforms import chunks, critical, merge, moments, protect


def _method(name: str, made_of: Policy, published: Timing | None = None) -> Policy:
    """Return a policy under a name of its own, as a base score of one link."""
    return dataclasses.replace(
        made_of, name=name, links=(), inherited=None, published=made_of.published if published is None else published
    )


@register
def pyramidkv(
    *, window: int = 32, kernel: int = 5, pooling: Literal["avg", "max"] = "avg", beta: int | float = 20.0
) -> Policy:
    """Score as SnapKV, with more slots in the first layers and fewer in the last (PyramidKV, arXiv 2406.02069).

    It is ``snapkv@pyramid``. The defaults of the score are those of :func:`kvjax.snapkv`, beta that of the authors'
    code.

    Args:
        window, kernel, pooling: see :func:`kvjax.snapkv`.
        beta: see :func:`kvjax.allocation.pyramid`.

    Example:
        >>> import kvjax
        >>> kvjax.parse("pyramidkv+caote").allocation.name
        'pyramid'
    """
    published = Timing("prompt", 0, "arXiv 2406.02069: compresses the prompt, before generation")
    scored = snapkv(window=window, kernel=kernel, pooling=pooling)
    return _method("pyramidkv", scored @ allocation.pyramid(beta=beta), published)


@register
def adakv(
    *,
    window: int = 32,
    kernel: int = 5,
    pooling: Literal["avg", "max"] = "avg",
    safeguard: int | float = 0.2,
    cap: int | float | None = allocation.CAP,
) -> Policy:
    """Score as SnapKV, with one top-k over all heads of a layer (Ada-SnapKV of AdaKV, arXiv 2407.11550).

    It is ``snapkv@adakv``. The paper has no limit on what one head holds: ``adakv(cap=None)``.

    Args:
        window, kernel, pooling: see :func:`kvjax.snapkv`.
        safeguard, cap: see :func:`kvjax.allocation.adakv`.

    Example:
        >>> import kvjax
        >>> str(kvjax.adakv(window=16) @ "uniform")
        'adakv(window=16)@uniform'
    """
    published = Timing("prompt", 0, "arXiv 2407.11550: compresses the prompt, before generation")
    scored = snapkv(window=window, kernel=kernel, pooling=pooling)
    return _method("adakv", scored @ allocation.adakv(safeguard=safeguard, cap=cap), published)


@register
def criticalkv(
    *, window: int = 32, kernel: int = 5, pooling: Literal["avg", "max"] = "avg", safe: float = 0.5
) -> Policy:
    """Let SnapKV's best tokens stay and ``|v W_O|`` choose the others, per layer (CriticalKV, arXiv 2502.03805).

    It is ``snapkv+critical@adakv``. The paper puts its second stage behind several methods; kvpress calls this one
    CriticalAdaKV.

    Args:
        window, kernel, pooling: see :func:`kvjax.snapkv`.
        safe: see :func:`kvjax.critical`.

    Example:
        >>> import kvjax
        >>> str(kvjax.criticalkv(kernel=7))
        'criticalkv(kernel=7)'
    """
    scored = snapkv(window=window, kernel=kernel, pooling=pooling)
    return _method("criticalkv", chain(scored, critical(safe=safe)) @ allocation.adakv())


@register
def defensivekv(*, window: int = 32, kernel: int = 5, safe: float = 0.5) -> Policy:
    """Let the worst case over the last queries choose, then ``|v W_O|``, per layer (DefensiveKV, arXiv 2510.13334).

    It is ``defensive+critical@layer``; ``defensivekv@model(normalise=False)`` is Layer-DefensiveKV, in which all
    layers compete. The authors' first stage keeps what holds nine tenths of a head's attention, and their second
    divides a norm by the sum of all heads'; here both are those of :func:`kvjax.critical`.

    Args:
        window, kernel: see :func:`kvjax.defensive`.
        safe: see :func:`kvjax.critical`.

    Example:
        >>> import kvjax
        >>> kvjax.parse("defensivekv(window=16)").allocation.name
        'layer'
    """
    published = Timing("prompt", 0, "arXiv 2510.13334, its authors' code: compresses the prompt, before generation")
    scored = chain(defensive(window=window, kernel=kernel), critical(safe=safe))
    return _method("defensivekv", scored @ allocation.layer(), published)


@register
def chunkkv(
    *,
    window: int = 32,
    kernel: int = 5,
    pooling: Literal["avg", "max"] = "avg",
    size: int = 20,
    heads: Literal["group", "layer"] = "group",
) -> Policy:
    """Score as SnapKV, and keep or evict whole chunks of the text (ChunkKV, arXiv 2502.00299).

    It is ``snapkv+chunks``. What differs from the paper and from kvpress stands at :func:`kvjax.chunks`.

    Args:
        window, kernel, pooling: see :func:`kvjax.snapkv`.
        size, heads: see :func:`kvjax.chunks`.

    Example:
        >>> import kvjax
        >>> str(kvjax.parse("chunkkv(size=10)@adakv"))
        'chunkkv(size=10)@adakv'
    """
    scored = snapkv(window=window, kernel=kernel, pooling=pooling)
    return _method("chunkkv", chain(scored, chunks(size=size, heads=heads)))


@register
def d2o(*, similarity: float = 0.0) -> Policy:
    """Merge what H2O evicts, with more slots in layers whose attention is dense (D2O, arXiv 2406.13035).

    It is ``h2o+merge@d2o``. The authors' code merges keys as well as values, at a similarity that moves with the text,
    and keeps all tokens of the first two layers and the last; see :func:`kvjax.merge` and :func:`kvjax.allocation.d2o`.

    Args:
        similarity: see :func:`kvjax.merge`.

    Example:
        >>> import kvjax
        >>> kvjax.d2o().allocation.name, kvjax.d2o().merging is not None
        ('d2o', True)
    """
    published = Timing("prompt", 1, "arXiv 2406.13035, its authors' code: once behind the prompt, then at every step")
    return _method("d2o", chain(h2o(), merge(similarity=similarity)) @ allocation.d2o(), published)


@register
def momentkv(
    *, window: int = 32, kernel: int = 5, pooling: Literal["avg", "max"] = "avg", size: int = 4, sinks: int = 1
) -> Policy:
    """Let SnapKV and the moments of evicted tokens choose, and the moments stand in (MomentKV, arXiv 2606.01563).

    It is ``snapkv+chunks(size=4)+moments+protect(sinks=1)@adakv``: as published a window of 32, the first token always,
    scores of 4 neighbours together, slots divided by attention within a layer. The pooling is :func:`kvjax.snapkv`'s.
    How it was read stands in NOTES.md: neither its full text nor its code was at hand.

    Args:
        window, kernel, pooling: see :func:`kvjax.snapkv`.
        size: how many neighbouring tokens have one score before their residuals.
        sinks: how many first tokens always stay.

    Example:
        >>> import kvjax
        >>> kvjax.momentkv().allocation.name, kvjax.protected("momentkv", 128)
        ('adakv', (1, 32))
    """
    scored = snapkv(window=window, kernel=kernel, pooling=pooling)
    links = chunks(size=size), moments(), protect(sinks=sinks)
    return _method("momentkv", chain(scored, *links) @ allocation.adakv())


@register
def simlayerkv(
    *,
    window: int = 32,
    kernel: int = 5,
    pooling: Literal["avg", "max"] = "avg",
    threshold: float = 0.9,
    sinks: int | float = 4,
    recent: int | float = 1024,
) -> Policy:
    """Let lazy layers keep first and last tokens alone, and others SnapKV's best (SimLayerKV, arXiv 2410.13846).

    It is ``snapkv@simlayer``. In the paper the other layers keep all tokens; here they share the rest of the budget.

    Args:
        window, kernel, pooling: see :func:`kvjax.snapkv`.
        threshold, sinks, recent: see :func:`kvjax.allocation.simlayer`.

    Example:
        >>> import kvjax
        >>> str(kvjax.simlayerkv(recent=0.5))
        'simlayerkv(recent=0.5)'
    """
    published = Timing("prompt", 0, "arXiv 2410.13846: once, when the prompt is in")
    scored = snapkv(window=window, kernel=kernel, pooling=pooling)
    lazy = allocation.simlayer(threshold=threshold, sinks=sinks, recent=recent)
    return _method("simlayerkv", scored @ lazy, published)


@register
def gate() -> Policy:
    """Keep what a trained gate scores highest: for a model that has one, any question later, one reading.

    It is ``zap+protect(sinks=4,recent=0.02)``, as Fast KVzip (arXiv 2601.17668) evicts: after each block of the prompt,
    and in decode after every 128 tokens, for which each head has slots beside its budget. New tokens stay that long
    whatever they score, without which a text is predicted much worse. Its authors' code protects more of the newest: 2%
    of the prompt, not of the budget, and 128 in decode.

    Example:
        >>> import kvjax
        >>> from kvjax.schedule import moments
        >>> kvjax.protected("gate", 1000)
        (4, 20)
        >>> moments(kvjax.parse("gate+caote"), "block", None)
        ('block', 128)
    """
    published = Timing("block", 128, "arXiv 2601.17668, its authors' code: in decode, when a buffer of 128 is full")
    return _method("gate", chain(zap(), protect(sinks=4, recent=0.02)), published)


@register
def repeat() -> Policy:
    """Keep what the model attends to when it repeats its prompt: any question later, each block is read about twice.

    It is ``kvzip@model(normalise=False,cap=8)``. The cap, of eight times the budget for one head, bounds the memory
    that has to be reserved before it is known which heads win.

    Example:
        >>> import kvjax
        >>> kvjax.parse("repeat").allocation.name
        'model(normalise=False,cap=8)'
    """
    return _method("repeat", kvzip() @ allocation.model(normalise=False, cap=8))


@register
def window() -> Policy:
    """Keep whole chunks that the prompt's last queries attend to: for a question that stands at the prompt's end.

    It is ``snapkv(kernel=7)+chunks``. Of all policies that docs/results/once.json compares, evicted once at a quarter
    with the question known, it has the best mean over the base model and the adapted one among those that hold no more
    on the way than the full cache, up to 3% for what they remember: 56% and 91%, 47 MiB at the most, where the full
    cache has 53% and 96% in 46 MiB. ``kvzip``, which is better, takes 93 MiB on the way.

    Example:
        >>> import kvjax
        >>> kvjax.protected("window", 1000)
        (0, 32)
    """
    return _method("window", chain(snapkv(kernel=7), chunks()))
