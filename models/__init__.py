"""Decoders that run under a KV budget: load, prefill, generate."""

from models.butler import Butler, ButlerConfig, butler_input, load_butler, own_butler, save_butler
from models.config import Config
from models.decoder import Decoder
from models.engine import Generation, Prefilled, generate, output_projection, prefill, stream
from models.layer_caches import stacked
from models.load import load, parse_mesh
from models.provenance import fingerprint
from models.save import save
from models.tokenizer import Tokenizer

__all__ = [
    "Butler",
    "ButlerConfig",
    "Config",
    "Decoder",
    "Generation",
    "Prefilled",
    "Tokenizer",
    "butler_input",
    "fingerprint",
    "generate",
    "load",
    "load_butler",
    "output_projection",
    "own_butler",
    "parse_mesh",
    "prefill",
    "save",
    "save_butler",
    "stacked",
    "stream",
]
