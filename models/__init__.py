"""Decoders that run under a KV budget: load, prefill, generate."""

from models.config import Config
from models.decoder import Decoder
from models.decoding import Generation, Prefilled, generate, output_projection, prefill, stream
from models.load import load, parse_mesh
from models.save import save
from models.tokenizer import Tokenizer

__all__ = [
    "Config",
    "Decoder",
    "Generation",
    "Prefilled",
    "Tokenizer",
    "generate",
    "load",
    "output_projection",
    "parse_mesh",
    "prefill",
    "save",
    "stream",
]
