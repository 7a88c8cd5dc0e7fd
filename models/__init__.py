"""Decoders that run under a KV budget: load, prefill, generate."""

from models.config import Config
from models.decoder import Decoder
from models.decoding import Generation, Prefilled, generate, prefill, stream

__all__ = ["Config", "Decoder", "Generation", "Prefilled", "generate", "prefill", "stream"]
