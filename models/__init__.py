"""Decoders that run under a KV budget: load, prefill, generate."""

from models.butler import Butler, ButlerConfig, butler_input, load_butler, own_butler, save_butler
from models.config import Config
from models.decoder import Decoder
from models.engine import Generation, Hidden, generate, hidden_states, output_projection, prefill, stream
from models.layer_caches import stacked
from models.load import load, parse_mesh
from models.plan import Prefilled
from models.provenance import fingerprint
from models.save import save
from models.sharing import prefill_each
from models.tokenizer import Tokenizer

__all__ = [
    "Butler",
    "ButlerConfig",
    "Config",
    "Decoder",
    "Generation",
    "Hidden",
    "Prefilled",
    "Tokenizer",
    "butler_input",
    "fingerprint",
    "generate",
    "hidden_states",
    "load",
    "load_butler",
    "output_projection",
    "own_butler",
    "parse_mesh",
    "prefill",
    "prefill_each",
    "save",
    "save_butler",
    "stacked",
    "stream",
]
