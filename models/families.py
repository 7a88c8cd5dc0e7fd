"""Model families from other packages: a config.json of a model_type that is not built in becomes a Config.

The decoder computes a model that its :class:`models.Config` describes, so a family is a function that describes it, and
the names of its tensors where they are not Llama's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvjax.checks import shown
from kvjax.registry import Registry
from models.config import Config


class Family(NamedTuple):
    """A reader of the models of one ``model_type``.

    Attributes:
        config: ``config(raw) -> Config`` for the object of a config.json.
        tensors: the tensors' names, by the parameters' names of ``models.parameters``, where they are not Llama's; {}
            stands for the layer.
    """

    config: Callable[[Mapping[str, Any]], Config]
    tensors: Mapping[str, str] = {}


def _family(name: str, family: Any) -> Family:
    made = family if isinstance(family, Family) else Family(family)
    if not callable(made.config):
        raise ValueError(f"{name!r} is {shown(family)}; expected a function from a config.json to a models.Config.")
    return made


FAMILIES: Registry[Family] = Registry("model family", "kvjax.families", _family)


def register_family(
    model_type: str, config: Callable[[Mapping[str, Any]], Config], tensors: Mapping[str, str] | None = None
) -> None:
    """Register a model family, so that ``models.load`` reads folders whose config.json has this ``model_type``.

    A package can offer the function, or a ``models.families.Family``, as an entry point of the ``model_type``'s name in
    the group ``kvjax.families``. A folder whose ``architectures`` names a built-in one is read as that one. What
    ``models.save`` writes is a folder of the built-in architecture that the config
    names.

    Args:
        model_type: as in the config.json.
        config: returns the :class:`models.Config` of the object in a config.json.
        tensors: the tensors' names, by the parameters' names of ``models.parameters``, where they are not Llama's; {}
            stands for the layer.

    Raises:
        ValueError: if another module or an installed package has the ``model_type``.

    Example:
        >>> import models
        >>> from models.config_json import from_hugging_face
        >>> def config(raw):
        ...     return from_hugging_face(
        ...         {
        ...             **raw, "architectures": ["LlamaForCausalLM"],
        ...             "hidden_size": raw["width"]
        ...         }
        ...     )
        >>> models.register_family(
        ...     "wide", config, {"layers.gate": "model.layers.{}.mlp.w1.weight"}
        ... )
        >>> raw = dict(
        ...     model_type="wide", vocab_size=8, width=16, intermediate_size=32,
        ...     num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> from_hugging_face(raw).hidden_size
        16
    """
    FAMILIES.add(model_type, Family(config, {} if tensors is None else tensors), source=config.__module__)
