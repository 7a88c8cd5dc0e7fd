"""A predictor in a folder: its weights, its shape, and which model it is for."""

from __future__ import annotations

from pathlib import Path

from jax.typing import DTypeLike

from models import trained
from models.butler.config import ButlerConfig, parameter_shapes
from models.butler.module import Butler
from models.decoder import Decoder
from models.load import find_folder
from models.published import PUBLISHED

KIND = trained.Kind("butler", "predictor", ButlerConfig, parameter_shapes)


def save_butler(folder: str | Path, butler: Butler, model: Decoder, name: str) -> None:
    """Write a predictor and a description of its model. Both files are complete before either gets its name.

    Where several processes hold a model together, all of them call this, and the first one writes.

    Args:
        folder: created if it does not exist.
        butler: the predictor, stored in its own dtype.
        model: the model that it was trained for: its config and a hash of some of its weights are stored, too.
        name: the model's name, for error messages.

    Example:
        >>> import tempfile
        >>> from flax import nnx
        >>> import models
        >>> config = models.Config(
        ...     64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2
        ... )
        >>> model = models.Decoder(config, rngs=nnx.Rngs(0))
        >>> butler = models.Butler(models.ButlerConfig.of(config), rngs=nnx.Rngs(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     models.save_butler(folder, butler, model, "a small one")
        ...     models.load_butler(folder, model).config == butler.config
        True
    """
    parameters = {own: getattr(butler, own)[...] for own in parameter_shapes(butler.config)}
    trained.save(KIND, folder, butler.config, parameters, model, name)


def load_butler(folder: str | Path, model: Decoder, *, dtype: DTypeLike | None = None) -> Butler:
    """Read the predictor of a model.

    Args:
        folder: a folder that :func:`save_butler` wrote.
        model: the model that the predictor is for, in any dtype.
        dtype: the dtype that the predictor computes and keeps its cache in; by default the model's. bfloat16 halves
            what a step reads of its weights, keys and values.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the predictor is of another model (the message names what differs), a file is damaged, or the dtype
            is unknown.

    Example:
        >>> from flax import nnx
        >>> import models
        >>> config = models.Config(
        ...     64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2
        ... )
        >>> models.load_butler(
        ...     "no/such/folder", models.Decoder(config, rngs=nnx.Rngs(0))
        ... )
        Traceback (most recent call last):
        ...
        FileNotFoundError: no/such/folder has no butler.json; give a folder that models.save_butler wrote.
    """
    return Butler(*trained.load(KIND, folder, model, model.embedding[...].dtype if dtype is None else dtype))


def own_butler(path: str | Path, model: Decoder, *, dtype: DTypeLike | None = None) -> Butler:
    """Load the predictor in the folder ``butler`` of a model's own folder, or the one that ships with kvjax for it.

    Args:
        path: the model's folder or name, as :func:`models.load` takes it.
        model: the model that :func:`models.load` returned for it.
        dtype: see :func:`load_butler`.

    Raises:
        ValueError: there is none, or :func:`load_butler` rejects it.

    Example:
        >>> import tempfile
        >>> from flax import nnx
        >>> import models
        >>> config = models.Config(
        ...     64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2
        ... )
        >>> model = models.Decoder(config, rngs=nnx.Rngs(0))
        >>> butler = models.Butler(models.ButlerConfig.of(config), rngs=nnx.Rngs(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     models.save_butler(f"{folder}/butler", butler, model, "a small one")
        ...     models.own_butler(folder, model).config == butler.config
        True
    """
    shipped = Path(__file__).parents[1] / str(path)  # that of "smollm2", whose weights are elsewhere
    folder = (shipped if path in PUBLISHED else find_folder(path)) / "butler"
    if not (folder / KIND.files[1]).is_file():
        raise ValueError(
            f"{path} has no predictor in its folder 'butler'; train one with python -m train.butler, and name its "
            "folder (--butler, or load_butler)."
        )
    return load_butler(folder, model, dtype=dtype)
