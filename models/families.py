"""Model families: how a config.json of a ``model_type`` becomes a Config, and what its tensors are called.

The decoder computes a model that its :class:`models.Config` describes, so a family is a function that describes it, and
the names of its tensors where they are not Llama's. The built-in ones are in :mod:`models.built_in`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from kvjax._src.checks import shown
from kvjax._src.registry import Registry
from models.config import Config


class HeadByHead(NamedTuple):
    """Name the parameters that a tensor holds head by head: all rows of one head, then those of the next.

    Attributes:
        parts: the parameters, in the order that a head's rows have.
        heads: ``heads(config)`` returns the number of heads.
    """

    parts: Sequence[str]
    heads: Callable[[Config], int]


Held = Sequence[str] | HeadByHead | Callable[[Config], Sequence[str]]
Fused = Mapping[str, Held]


class Gguf(NamedTuple):
    """Describe how llama.cpp stores a family in a GGUF file.

    Attributes:
        architecture: llama.cpp's name of the family.
        keys: its keys beside those of all architectures, and the fields that ``raw`` has of them.
        fields: ``fields(raw, tensors)`` returns fields to add to ``raw``, a config.json, or to replace in it. It raises
            ValueError where the file asks for what is not supported.
        neighbours: whether llama.cpp rotates neighbouring elements of a head.
        fused: tensors that hold several parameters, by Hugging Face's names, where they are not the family's.
        takes_turns: whether the value heads of a delta net take turns: the first of each key head, then the second.
    """

    architecture: str
    keys: Mapping[str, str] = {}
    fields: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] = lambda raw, tensors: {}
    neighbours: bool = False
    fused: Mapping[str, Held] = {}
    takes_turns: bool = False


def parts_and_heads(held: Held, config: Config) -> tuple[Sequence[str], int]:
    """Return the parameters that a fused tensor holds, and in how many turns it does so."""
    if isinstance(held, HeadByHead):
        return held.parts, held.heads(config)
    return (held(config) if callable(held) else held), 1


class Family(NamedTuple):
    """Describe how the models of one ``model_type`` are read, and what their tensors are called.

    Attributes:
        config: ``config(raw) -> Config`` for the object of a config.json.
        tensors: the tensors' names, by the parameters' names of ``models.parameters``, where they are not Llama's; {}
            stands for the layer.
        fused: tensors that hold several parameters of a layer, one after the other, or head by head: their names, and
            the parameters, or a function that returns those of a config.
        architecture: transformers' class, which a config.json names; None for a family that is found by its
            ``model_type`` and saved as the one that its config names.
        gguf: how GGUF files store it; None if they do not.
        joined_experts: whether a layer's experts are stored together, as in :mod:`models.joined_experts`; "rows" if
            they may be, as in Qwen3.5, and are saved one by one; "only rows" if they are saved so, too, as in Gemma 4;
            "linears" if they are as in Granite 4.
        inside: models that also see or hear, in which it is the language model: their ``model_type``, and the one that
            their ``text_config`` names. Only the language model is read.
    """

    config: Callable[[Mapping[str, Any]], Config]
    tensors: Mapping[str, str] = {}
    fused: Mapping[str, Held] = {}
    architecture: str | None = None
    gguf: Gguf | None = None
    inside: Mapping[str, str] = {}
    joined_experts: bool | Literal["rows", "linears", "only rows"] = False


def _family(name: str, family: Any) -> Family:
    made = family if isinstance(family, Family) else Family(family)
    if not callable(made.config):
        raise ValueError(f"{name!r} is {shown(family)}; expected a function from a config.json to a models.Config.")
    for other, known in FAMILIES.items():
        if other != name and (shared := _architectures(made) & _architectures(known)):
            raise ValueError(f"{name!r} names the architecture {min(shared)[1]!r}, which {other!r} has; give its own.")
    return made


def _architectures(family: Family) -> set[tuple[str, str]]:
    """Return the names by which files choose the family: that of a config.json, and that of a GGUF file."""
    stored = None if family.gguf is None else family.gguf.architecture
    return {(of, name) for of, name in (("config.json", family.architecture), ("GGUF", stored)) if name is not None}


FAMILIES: Registry[Family] = Registry("model family", "kvjax.families", _family, ("models.built_in",))


def family_of_architecture(name: str) -> Family:
    """Return the family that a Config names as its ``architecture``: one whose models are not saved as another's."""
    family = FAMILIES.find(name)
    if family is None or family.architecture is None:
        known = [known for known, family in FAMILIES.items() if family.architecture is not None]
        raise ValueError(f"the config's architecture is {shown(name)}; expected one of {', '.join(known)}.")
    return family


def register_family(
    model_type: str,
    config: Callable[[Mapping[str, Any]], Config],
    tensors: Mapping[str, str] | None = None,
    *,
    fused: Fused | None = None,
    architecture: str | None = None,
    gguf: Gguf | None = None,
    inside: Mapping[str, str] | None = None,
    joined_experts: bool | Literal["rows", "linears", "only rows"] = False,
) -> None:
    """Register a model family, so that ``models.load`` reads folders whose config.json has this ``model_type``.

    A package can offer the function, or a ``models.families.Family``, as an entry point of the ``model_type``'s name in
    the group ``kvjax.families``.

    Args:
        model_type: as in the config.json.
        config: returns the :class:`models.Config` of the object in a config.json.
        tensors: the tensors' names, by the parameters' names of ``models.parameters``, where they are not Llama's; {}
            stands for the layer.
        fused, architecture, gguf, inside, joined_experts: as in :class:`models.families.Family`. Without an
            ``architecture``, ``models.save`` writes a folder of the architecture that the config names.

    Raises:
        ValueError: if another module or an installed package has the ``model_type``, or another family the
            ``architecture``, or that of ``gguf``.

    Example:
        >>> import models
        >>> from models.config_json import completed, config_of, from_hugging_face
        >>> models.register_family(
        ...     "wide",
        ...     lambda raw: config_of(
        ...         completed({**raw, "hidden_size": raw["width"]}, "llama")
        ...     ),
        ...     {"layers.gate": "model.layers.{}.mlp.w1.weight"},
        ... )
        >>> raw = dict(
        ...     model_type="wide", vocab_size=8, width=16, intermediate_size=32,
        ...     num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> from_hugging_face(raw).hidden_size
        16
    """
    family = Family(config, tensors or {}, fused or {}, architecture, gguf, inside or {}, joined_experts)
    FAMILIES.add(model_type, family, source=config.__module__)
