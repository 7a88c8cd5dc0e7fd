"""The shape of TokenButler's predictor, and the parameters that it has."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from kvjax.checks import check_count, check_fields
from models.config import Config
from models.parameters import parameter_shapes as model_shapes

Source = Literal["layer0_output", "attention_input"]
SOURCES = ("layer0_output", "attention_input")
# (hidden, D') as published, by the model's E, L and N: Llama-3.2-1B, 3.2-3B, the 7B and 8B models, Qwen2.5-3B.
PUBLISHED = {
    (2048, 16, 32): (512, 16),
    (3072, 28, 24): (1024, 16),
    (4096, 32, 32): (1024, 32),
    (2048, 36, 16): (768, 32),
}


@dataclasses.dataclass(frozen=True)
class ButlerConfig:
    """The shape of a predictor.

    Args:
        hidden_size, num_layers, num_heads: the model's E, L (including layer 0) and N.
        hidden: the hidden width of the two networks.
        dim: D', the width of the predicted queries and keys.
        reduction: E / r; r is rounded up to a multiple of 2 N, for N heads of even width.
        source: what the predictor reads: layer 0's output, as in the paper, or the normalised embeddings that enter
            layer 0's attention, as in its code.
        rope_theta: the base of both rotary embeddings.
        dropout: the share of the feed-forward's output that training drops.
        published_layout: whether to add the parameters that the public predictor has but never uses (outputs for layer
            0, a LayerNorm of width E), so that parameters are counted as in the paper.

    Example:
        >>> from models.butler import ButlerConfig
        >>> ButlerConfig(64, num_layers=3, num_heads=4, hidden=16, dim=4).reduced
        8
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    hidden: int
    dim: int
    reduction: int = 8
    source: Source = "layer0_output"
    rope_theta: float = 10_000.0
    dropout: float = 0.1
    published_layout: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("hidden_size", "num_heads", "hidden", "dim", "reduction"):
            check_count(name, getattr(self, name), 1, "it must be at least 1")
        check_count("num_layers", self.num_layers, 2, "layer 0 is not predicted, so give at least 2")
        if self.dim % 2:
            raise ValueError(f"dim is {self.dim}; rotary embedding needs an even one.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; give a share in [0, 1).")

    @property
    def reduced(self) -> int:
        """r, the width of the predictor's attention."""
        step = 2 * self.num_heads
        return step * math.ceil(self.hidden_size / self.reduction / step)

    @property
    def predicted_layers(self) -> int:
        """L' = L - 1."""
        return self.num_layers - 1

    @classmethod
    def of(cls, model: Config, *, source: Source = "layer0_output", share: float = 0.01) -> ButlerConfig:
        """Return the predictor's shape for a model: the published one if there is one, else by a parameter share.

        D' is then a quarter of the model's D, and ``hidden`` as wide as the share allows, but at least E / 8: in a
        small model the attention and its feed-forward, E^2 / 2, already take the share.

        Args:
            model: the model's config.
            source: see the class.
            share: the predictor's share of the model's parameters, for a shape that is not published.

        Raises:
            ValueError: the share is not in (0, 1), or the model has a single layer.

        Example:
            >>> from models.butler import ButlerConfig
            >>> from models.config import Config
            >>> llama = Config(
            ...     128256, 2048, 8192, num_layers=16, num_heads=32, num_kv_heads=8,
            ...     tie_embeddings=True
            ... )
            >>> published = ButlerConfig.of(llama)
            >>> published.hidden, published.dim
            (512, 16)
        """
        if not 0 < share < 1:
            raise ValueError(f"share is {share}; give the predictor's share of the model's parameters, in (0, 1).")
        known = PUBLISHED.get((model.hidden_size, model.num_layers, model.num_heads))
        hidden, dim = known or (model.hidden_size, max(2, 2 * round(model.head_dim / 8)))
        config = cls(
            hidden_size=model.hidden_size,
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            hidden=hidden,
            dim=dim,
            source=source,
            rope_theta=model.rope.theta,
            published_layout=known is not None,
        )
        if known:
            return config
        networks = 2 * (config.hidden_size + config.predicted_layers * config.num_heads * dim)  # per unit of hidden
        left = share * _count(model_shapes(model)) - (num_parameters(config) - hidden * networks)
        return dataclasses.replace(config, hidden=max(int(left / networks) // 8 * 8, math.ceil(model.hidden_size / 8)))


def parameter_shapes(config: ButlerConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a predictor, by its name in :class:`Butler`.

    Example:
        >>> from models.butler import ButlerConfig, parameter_shapes
        >>> parameter_shapes(
        ...     ButlerConfig(64, num_layers=3, num_heads=4, hidden=16, dim=4)
        ... )["query_out"]
        (16, 2, 4, 4)
    """
    E, r, N, H, D = config.hidden_size, config.reduced, config.num_heads, config.hidden, config.dim
    shapes = {
        "reduce": (E, r),
        "query": (r, N, r // N),
        "key": (r, N, r // N),
        "value": (r, N, r // N),
        "norm": (r,),
        "norm_bias": (r,),
        "up": (r, 2 * r),
        "up_bias": (2 * r,),
        "down": (2 * r, E),
        "down_bias": (E,),
        "query_in": (E, H),
        "query_out": (H, config.predicted_layers, N, D),
        "key_in": (E, H),
        "key_out": (H, config.predicted_layers, N, D),
    }
    if config.published_layout:
        shapes |= {"unused_query": (H, N, D), "unused_key": (H, N, D), "unused_norm": (E,), "unused_norm_bias": (E,)}
    return shapes


def num_parameters(config: ButlerConfig) -> int:
    """Return the number of a predictor's parameters.

    Example:
        >>> from models.butler import ButlerConfig, num_parameters
        >>> num_parameters(
        ...     ButlerConfig(64, num_layers=3, num_heads=4, hidden=16, dim=4)
        ... )
        5024
    """
    return _count(parameter_shapes(config))


def _count(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
