"""TokenButler's predictor: its shape (config), what it computes (module), and its files (io)."""

from models.butler.config import SOURCES, ButlerConfig, num_parameters, parameter_shapes
from models.butler.io import KIND, load_butler, own_butler, save_butler
from models.butler.module import Butler, ButlerCache, Predicted, attention_in_chunks, butler_input, importance

__all__ = [
    "KIND",
    "SOURCES",
    "Butler",
    "ButlerCache",
    "ButlerConfig",
    "Predicted",
    "attention_in_chunks",
    "butler_input",
    "importance",
    "load_butler",
    "num_parameters",
    "own_butler",
    "parameter_shapes",
    "save_butler",
]
