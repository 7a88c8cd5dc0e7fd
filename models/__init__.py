"""Decoders that run under a KV budget: load, prefill, generate."""

from typing import TYPE_CHECKING

from kvjax._src.first_use import on_first_use

if TYPE_CHECKING:
    from models.asking import Answers, Watch, ask
    from models.batching import Engine, NewToken
    from models.butler import Butler, ButlerConfig, butler_input
    from models.calibration import head_scores, q_filters, query_centres
    from models.config import Config
    from models.decoder import Decoder
    from models.engine import Generation, Hidden, generate, hidden_states, output_projection, prefill, stream
    from models.families import register_family
    from models.fingerprints import fingerprint
    from models.loading import load
    from models.mesh import parse_mesh
    from models.networks import load_network, own_network, save_network
    from models.options import Options
    from models.prompts import Prefilled
    from models.repeating import with_repeat_prompt
    from models.restoring import load_restorer, prefill_restored
    from models.sampling import Draws
    from models.saving import save
    from models.scorer import RetentionGate, Scorer, ScorerConfig
    from models.sharing import prefill_each
    from models.teacher_forcing import teacher_forced
    from models.tokenizer import Tokenizer
    from models.topics import Episode, episode_of, episodes
else:
    __getattr__, __dir__ = on_first_use(__name__)

__all__ = [
    "Answers",
    "Butler",
    "ButlerConfig",
    "Config",
    "Decoder",
    "Draws",
    "Engine",
    "Episode",
    "Generation",
    "Hidden",
    "NewToken",
    "Options",
    "Prefilled",
    "RetentionGate",
    "Scorer",
    "ScorerConfig",
    "Tokenizer",
    "Watch",
    "ask",
    "butler_input",
    "episode_of",
    "episodes",
    "fingerprint",
    "generate",
    "head_scores",
    "hidden_states",
    "load",
    "load_network",
    "load_restorer",
    "output_projection",
    "own_network",
    "parse_mesh",
    "prefill",
    "prefill_each",
    "prefill_restored",
    "q_filters",
    "query_centres",
    "register_family",
    "save",
    "save_network",
    "stream",
    "teacher_forced",
    "with_repeat_prompt",
]
