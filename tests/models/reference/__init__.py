"""What blockwise eviction means, in plain NumPy float64: one prompt at a time, every key kept, evicting by a mask.

Nothing here comes from kvjax, models or kernels_pallas, but for ``made``, which makes models to test with. The formulae
are those of the papers and of docs/architecture.md. ``decoder`` runs, ``policies`` says what a short name means,
``predictor`` is TokenButler's, ``eight_bits`` rounds rows, ``choices`` notes how close each choice was; the allocations
are those of tests/kvjax/contests.py. ``latent`` has multi-head latent attention in both its forms.
"""

from tests.models.reference.choices import NEAR, SMALL, Choices, Near
from tests.models.reference.decoder import Run, norm, run, softmax
from tests.models.reference.made import butler, decoder, masked_logits, parameters, retention, scorer
from tests.models.reference.policies import Policy, policy
from tests.models.reference.predictor import predicted
from tests.models.reference.rotary import inverse_frequencies, rope

__all__ = [
    "NEAR", "SMALL", "Choices", "Near", "Policy", "Run", "butler", "decoder", "inverse_frequencies", "masked_logits",
    "norm", "parameters", "policy", "predicted", "retention", "rope", "run", "scorer", "softmax",
]  # fmt: skip
