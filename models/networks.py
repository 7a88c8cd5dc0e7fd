"""The small networks that are trained for a frozen model, which one a run reads, and their files.

A network reads what the model computes and predicts something of each token (:class:`kvjax.Prediction`), which
policies and selections read. ``predicts`` names the fields that it fills in, ``trained_by`` the module whose command
trains it. One that ``looks_ahead`` remembers tokens, and sees each block between layer 0 and the others.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool
from safetensors.numpy import save as to_safetensors

from kvjax import Policy
from kvjax._src.checks import check_names, is_known, shown
from kvjax.sources import Source
from models import fingerprints, hosts, hub, published
from models.butler import Butler, ButlerConfig
from models.checkpoint import opened
from models.config import Config, described
from models.decoder import Decoder
from models.files import to_json, warn_of_unfinished, write_files
from models.folders import find_folder
from models.parameters import known_dtype
from models.published_gates import read_gate
from models.scorer import SIZES, RetentionGate, Scorer, ScorerConfig
from models.tokenizer import read_object

# Fields of a model's config that do not affect what its attention reads.
INDIFFERENT = {"bos", "eos", "pad", "max_positions"}

Network = Butler | Scorer
Networks = Network | Sequence[Network] | None
# By the kind in their configs, the name of their files: KIND.safetensors and KIND.json.
NETWORKS: dict[str, Any] = {"butler": Butler, "gate": Scorer, "scorer": Scorer, "retention": RetentionGate}


# Which network a run reads.


def wanted_by(policy: Policy | None, source: Source | None = None) -> frozenset[str]:
    """Return the fields of a :class:`kvjax.Prediction` that a policy or a selection reads."""
    if source is not None and "predicted" in source.reads:
        return frozenset({"query", "key"})
    return frozenset() if policy is None else policy.needs.predicted


def remembers(policy: Policy | None) -> bool:
    """Return whether a policy reads a network that remembers tokens outside the cache."""
    wanted = wanted_by(policy)
    return bool(wanted) and wanted <= Butler.predicts


def several(networks: Networks) -> tuple[Network, ...]:
    """Return networks as a tuple, from one, several, or None."""
    if networks is None:
        return ()
    given = tuple(networks) if isinstance(networks, list | tuple) else (networks,)
    for network in given:
        if not isinstance(network, Network):
            raise ValueError(f"networks is {shown(networks)}; give what models.load_network returned, or several.")
    return given


def read_by(networks: Networks, policy: Policy | None, source: Source | None = None) -> tuple[Network, ...]:
    """Return those of the networks that a policy or a selection reads."""
    wanted = wanted_by(policy, source)
    return tuple(network for network in several(networks) if wanted and wanted <= network.predicts)


def network_of(
    networks: Networks, model: Decoder, policy: Policy | None, source: Source | None = None
) -> Network | None:
    """Return the network that a run reads, None if it reads none; one that ships for the model need not be given.

    Raises:
        ValueError: none was given that the run needs, or several were; nothing reads what was given; or the network is
            of another model.
    """
    given, wanted = several(networks), wanted_by(policy, source)
    if not given and not wanted:
        return None
    if not wanted:
        said = ", ".join(f"{network.name} ({', '.join(sorted(network.predicts))})" for network in given)
        raise ValueError(
            f"networks={said} was given, but nothing reads what it predicts; give a policy or a selection that "
            "does, such as 'zap', or leave networks out."
        )
    fitting = read_by(given, policy, source)
    if not fitting and (folder := shipped(model, *names_for(wanted))):
        return cast(Network, load_network(folder, model))
    asks = f"select={source.name!r}" if source is not None else f"the policy {policy.name if policy else None!r}"
    if len(fitting) != 1:
        what = f"a network that predicts {' and '.join(sorted(wanted))}"
        if fitting:
            names = ", ".join(network.name for network in fitting)
            raise ValueError(f"{asks} needs {what}, but {len(fitting)} were given ({names}); give one of them.")
        raise ValueError(
            f"{asks} needs {what}: pass networks=models.load_network(folder, model), after training one with "
            f"{_trainers(names_for(wanted))}."
        )
    (network,) = fitting
    sizes = [size for size in SIZES if hasattr(network.config, size)]
    theirs, ours = ([getattr(shape, size) for size in sizes] for shape in (network.config, model.config))
    if theirs != ours:
        raise ValueError(
            f"the {network.name} is of another model, with {', '.join(sizes)} = {theirs}; this one has {ours}. Train "
            "one for this model."
        )
    parameters = parameters_of(network)
    if is_known(*parameters.values()) and not _all_finite(parameters):
        wrong = sorted(name for name, array in parameters.items() if not _all_finite({name: array}))
        raise ValueError(
            f"the {network.name} has NaN or infinite numbers in {', '.join(wrong)}, with which all tokens score alike; "
            "train it again, or load another."
        )
    return network


@jax.jit
def _all_finite(parameters: dict[str, Array]) -> Bool[Array, ""]:
    """Return whether all numbers are finite: under jit, a score of NaN would go unnoticed."""
    return functools.reduce(jnp.logical_and, (jnp.isfinite(array).all() for array in parameters.values()))


def names_for(wanted: frozenset[str]) -> list[str]:
    """Return the names of the networks that predict some fields of a :class:`kvjax.Prediction`."""
    return [name for name, kind in NETWORKS.items() if wanted <= kind.predicts]


def _trainers(names: Iterable[str]) -> str:
    return " or ".join(sorted({f"python -m {NETWORKS[name].trained_by}" for name in names}))


# Their files.


def parameters_of(network: Network) -> dict[str, Array]:
    """Return a network's parameters by name."""
    return {name: getattr(network, name)[...] for name in network.config.shapes}


def files_of(name: str) -> tuple[str, str]:
    """Return the names of a network's files: the weights and the config."""
    return f"{name}.safetensors", f"{name}.json"


def save_network(folder: str | Path, network: Network, model: Decoder, name: str) -> None:
    """Write a network and a description of its model. Both files are complete before either gets its name.

    Where several processes hold a model together, all of them call this, and the first one writes.

    Args:
        folder: created if it does not exist.
        network: stored in its own dtype.
        model: the model that it was trained for: its config and a hash of some of its weights are stored, too.
        name: that of the model, for error messages.

    Example:
        >>> import tempfile
        >>> from flax import nnx
        >>> import models
        >>> model = models.Decoder.tiny()
        >>> shape = models.ScorerConfig.of(model.config, kind="gate")
        >>> gate = models.Scorer(shape, rngs=nnx.Rngs(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     models.save_network(folder, gate, model, "a small one")
        ...     models.load_network(folder, model).name
        'gate'
    """
    description = {"name": name, **fingerprint(model)}
    if not hosts.first():
        return
    tensors = {own: np.asarray(jax.device_get(array)) for own, array in parameters_of(network).items()}
    about = {network.name: dataclasses.asdict(network.config), "model": description}
    weights_file, config_file = files_of(network.name)
    files = {weights_file: to_safetensors(tensors), config_file: to_json(about).encode()}
    write_files(Path(os.path.expanduser(folder)), files)


def load_network(folder: str | Path, model: Decoder, *, dtype: DTypeLike | None = None) -> Any:
    """Read a network of a model.

    Args:
        folder: a folder that a trainer or :func:`save_network` wrote; or a published gate, KVzap's (linear or with a
            hidden layer) as transformers saves it, or Fast KVzip's as safetensors (``models/published_gates.py``); or
            a name on the Hugging Face hub.
        model: the model that the network is for, in any dtype.
        dtype: the dtype that TokenButler's predictor computes in; by default the model's. bfloat16 halves what a step
            reads of its weights, keys and values. A scorer keeps its file's.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the network is of another model (the message names what differs; published gates say only their
            sizes), a file is damaged or pickled, or the folder has several networks.

    Example:
        >>> import models
        >>> models.load_network("no/such/folder", models.Decoder.tiny())
        Traceback (most recent call last):
        ...
        FileNotFoundError: no/such/folder holds no network; give a folder that models.save_network wrote.
    """
    folder = os.path.expanduser(folder)
    if not os.path.isdir(folder) and hub.NAME.fullmatch(folder):
        folder = hub.find(folder)
    folder = Path(folder)
    names = [name for name in NETWORKS if (folder / files_of(name)[1]).is_file()]
    if len(names) > 1:
        raise ValueError(f"{folder} has several networks: {', '.join(names)}; give each a folder of its own.")
    published = None if names else read_gate(folder, model.config)
    if not names and published is None:
        raise FileNotFoundError(f"{folder} holds no network; give a folder that models.save_network wrote.")
    warn_of_unfinished(folder)
    name, config, tensors = _read_own(folder, names[0], model) if published is None else published
    if wrong := sorted(own for own, tensor in tensors.items() if not np.isfinite(tensor.astype(float)).all()):
        place = folder if published else folder / files_of(name)[0]
        raise ValueError(f"{place} holds NaN or infinite numbers in {', '.join(wrong)}; train or copy it again.")
    wanted = None
    if name == "butler":
        wanted = model.embedding[...].dtype if dtype is None else known_dtype(dtype)
    parameters = {own: jax.device_put(tensor.astype(wanted or tensor.dtype)) for own, tensor in tensors.items()}
    return NETWORKS[name](config, parameters)


def _read_own(
    folder: Path, name: str, model: Decoder
) -> tuple[str, ButlerConfig | ScorerConfig, dict[str, np.ndarray]]:
    """Return the name, the config and the parameters of a network that :func:`save_network` wrote for a model."""
    weights_file, config_file = files_of(name)
    if not (folder / weights_file).is_file():
        raise FileNotFoundError(f"{folder} has no {weights_file}; give a folder that models.save_network wrote.")
    about = read_object(folder / config_file)
    try:
        config, made_for = _config_of(name, about[name], model.config), about["model"]
        theirs, their_weights, their_name = {**made_for["config"]}, made_for["weights"], made_for["name"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / config_file} describes no {name} ({error}); train or copy it again.") from None
    ours = _described(model.config)
    differing = list(_differences(theirs, ours))
    if differing:
        pairs = ", ".join(f"{at} {shown(there)} there and {shown(here)} here" for at, there, here in differing[:3])
        pairs += f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ValueError(f"{folder} holds a {name} of another model, {their_name}: {pairs}; train one for this model.")
    if their_weights != fingerprint(model)["weights"]:
        raise ValueError(
            f"{folder} holds a {name} of another model, {their_name}, with this one's shape but other weights; "
            "train one for this model."
        )
    with opened(folder / weights_file) as held:
        tensors = {own: held.get_tensor(own) for own in held.keys()}  # noqa: SIM118  it is no dict
    shapes, expected = {own: tensor.shape for own, tensor in tensors.items()}, config.shapes
    if shapes != expected:
        wrong = sorted(own for own in {*shapes, *expected} if shapes.get(own) != expected.get(own))
        raise ValueError(
            f"{folder / weights_file} does not fit its {config_file} in {', '.join(wrong)}; copy both again."
        )
    return name, config, tensors


def _config_of(name: str, fields: dict[str, Any], model: Config) -> ButlerConfig | ScorerConfig:
    """Return the config in a network's file; earlier scorers had no num_heads there, and gates a dim for hidden."""
    if name == "butler":
        return ButlerConfig(**fields)
    fields = {"num_heads": model.num_heads, **fields, "kind": name}
    if "dim" in fields:
        fields["hidden"] = fields.pop("dim")
    return ScorerConfig(**fields)


def shipped(model: Decoder, *names: str) -> Path | None:
    """Return the folder of a network that ships with kvjax for a model, None without one, or where weights are traced.

    It is found by the fingerprint in its files, wherever the model came from.

    Args:
        names: "butler", "gate" or "scorer", the first one that ships; all by default.

    Example:
        >>> import models
        >>> from models.networks import shipped
        >>> model, _ = models.load("retriever")
        >>> shipped(model).name, shipped(model, "gate"), shipped(models.Decoder.tiny())
        ('butler', None, None)
    """
    ours = _described(model.config)
    fitting = [network for network in _all_shipped() if not any(_differences(network[2]["config"], ours))]
    if not fitting or not is_known(*jax.tree.leaves(model)):
        return None
    weights = fingerprints.weights_of(model)
    for wanted in names or tuple(NETWORKS):
        for name, folder, made_for in fitting:
            if name == wanted and made_for["weights"] == weights:
                return folder
    return None


@functools.cache
def _all_shipped() -> list[tuple[str, Path, dict[str, Any]]]:
    """Return the name, the folder and the described model of each network that ships."""
    places = published.folders().values()
    found = sorted((name, file) for name in NETWORKS for place in places for file in place.rglob(files_of(name)[1]))
    return [(name, file.parent, read_object(file)["model"]) for name, file in found]


def own_network(path: str | Path, model: Decoder, *names: str, dtype: DTypeLike | None = None) -> Any:
    """Load a network from a folder of its name in a model's own folder, or the one that ships with kvjax for it.

    Args:
        path: the model's folder or name, as :func:`models.load` takes it.
        model: the model that :func:`models.load` returned for it.
        names: "butler", "gate" or "scorer", the first one that is there; all by default.
        dtype: see :func:`load_network`.

    Raises:
        ValueError: there is none, or :func:`load_network` rejects it.

    Example:
        >>> import models
        >>> model, _ = models.load("retriever")
        >>> sorted(models.own_network("retriever", model).predicts)
        ['key', 'query']
    """
    names = names or tuple(NETWORKS)
    check_names("network", names, NETWORKS)
    folder = own_folder(path, model, *names)
    if folder is None:
        raise ValueError(
            f"{path} has no folder {' or '.join(names)} with a network; train one with "
            f"{_trainers(names)}, and name its folder (--networks, or models.load_network)."
        )
    return load_network(folder, model, dtype=dtype)


def own_folder(path: str | Path, model: Decoder, *names: str) -> Path | None:
    """Return the folder of the network that :func:`own_network` loads, None if there is none."""
    place = find_folder(path)
    own = (place / name for name in names if (place / name / files_of(name)[1]).is_file())
    return next(own, None) or shipped(model, *names)


def load_networks(
    folders: Iterable[str | Path] | None,
    path: str | Path,
    model: Decoder,
    wanted: Iterable[frozenset[str]] = (),
    dtype: DTypeLike | None = None,
) -> tuple[Network, ...]:
    """Load networks from folders, and from the model's own folder, ``path``, for what these do not predict.

    ``wanted`` is what is read, as :func:`wanted_by` says it.
    """
    found = [load_network(folder, model, dtype=dtype) for folder in folders or ()]
    for fields in wanted:
        if fields and not any(fields <= network.predicts for network in found):
            found.append(own_network(path, model, *names_for(fields), dtype=dtype))
    return tuple(found)


def fingerprint(model: Decoder) -> dict[str, Any]:
    """Return what identifies a model, for JSON: its config, and a hash of some of its weights."""
    return {"config": _described(model.config), "weights": fingerprints.weights_of(model)}


def _differences(theirs: Any, ours: Any, at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield where two configs differ, such as "rope.theta", and what stands there in each."""
    if not isinstance(theirs, dict) or not isinstance(ours, dict):
        if theirs != ours:
            yield at, theirs, ours
        return
    for field in sorted({*theirs, *ours}):
        yield from _differences(theirs.get(field), ours.get(field), f"{at}.{field}".lstrip("."))


def _described(config: Config) -> dict[str, Any]:
    """Return a model's config as JSON values, without the fields that do not matter here."""
    fields = json.loads(json.dumps(described(config)))
    return {name: value for name, value in fields.items() if name not in INDIFFERENT}
