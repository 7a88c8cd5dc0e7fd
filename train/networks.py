"""Trains a small network for a frozen model: what the trainers of TokenButler's predictor and of scorers share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array

from models.butler import ButlerConfig
from models.decoder import Decoder
from models.networks import NETWORKS, files_of, parameters_of, save_network
from models.scorer import ScorerConfig
from train import loop
from train.loop import Parameters
from train.text import Corpus


class Objective(NamedTuple):
    """What a network learns, and the figures of held-out text that judge it.

    Attributes:
        loss: (model, network, what ``given`` returned, key of the step) -> the loss; compiled.
        measure: (network) -> figures for the log by name: numbers, or arrays with one of each layer.
        compare: (network) -> the summary's figures, a tree of such arrays, and more of its entries.
        given: (rows on the mesh) -> what the loss reads of a step's rows; not compiled.
        begin: () -> the parameters that do not begin as they are drawn, by name, on the host.
        described: what run.json has beside the network's shape and the settings.
    """

    loss: Callable[[Decoder, Any, Any, Array], Array]
    measure: Callable[[Any], dict[str, Any]]
    compare: Callable[[Any], tuple[dict[str, Any], dict[str, Any]]]
    given: Callable[[Array], Any] = lambda rows: rows
    begin: Callable[[], dict[str, Any]] = dict
    described: dict[str, Any] | None = None


def train(
    folder: str | Path,
    model: Decoder,
    config: ButlerConfig | ScorerConfig,
    corpus: Corpus,
    settings: loop.Settings,
    objective: Objective,
    *,
    budget: float,
    options: loop.Options,
) -> tuple[Any, dict[str, Any] | None]:
    """Train a network, from the newest whole checkpoint in ``folder`` if there is one and ``options.resume`` is true.

    ``budget`` is the share of the tokens that count for the figures. For the other arguments and the errors see
    :func:`train.loop.run`.

    Returns:
        The network, and the summary; None if the run was stopped before its end.
    """
    if not 0 < budget <= 1:
        raise ValueError(f"--budget is {budget}; give a share of the tokens, in (0, 1].")
    kind, name = NETWORKS[config.kind], config.kind
    folder, mesh = Path(folder), options.mesh or loop.one_device()

    def init() -> loop.State:
        begun = objective.begin()

        def make() -> Parameters:
            return parameters_of(kind(config, rngs=nnx.Rngs(settings.seed))) | begun

        return loop.init_state(make, settings, mesh)

    def loss(model: Decoder, parameters: Parameters, given: Any, key: Array) -> Array:
        return objective.loss(model, kind(config, parameters), given, key)

    def measure(parameters: Parameters) -> dict[str, float]:
        found = objective.measure(kind(config, parameters))
        return {figure: float(np.mean(values)) for figure, values in found.items()}

    def summarise(parameters: Parameters) -> tuple[dict[str, Any], dict[str, float]]:
        found, told = objective.compare(kind(config, parameters))
        means = jax.tree.map(lambda values: round(float(values.mean()), 6), found)
        told |= {
            "parameters": sum(array.size for array in parameters.values()),
            "budget": budget,
            "held_out_rows": len(corpus.held_out),
            "figures": means,
            "layers": jax.tree.map(lambda values: values.round(6).tolist(), found),
        }
        return told, {key: own["hit_rate"] if isinstance(own, dict) else own for key, own in means.items()}

    step = loop.make_step(loss, settings, mesh)
    trainer = loop.Trainer(
        command=kind.trained_by,
        configuration={name: dataclasses.asdict(config), **(objective.described or {})},
        init=init,
        step=lambda model, state, rows, number: step(model, state, objective.given(rows), number),
        save=lambda parameters: save_network(folder, kind(config, parameters), model, options.name),
        measure=measure,
        summarise=summarise,
        files=files_of(name),
    )
    parameters, summary = loop.run(folder, trainer, model, corpus, settings, options)
    return kind(config, parameters), summary
