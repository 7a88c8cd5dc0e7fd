"""Additions to kvjax from outside: a score, an allocation, a source, a family
of models, an evaluation.
"""

import functools

import jax.numpy as jnp
import numpy as np

import kvjax
from evals import command_line, evaluator, prose
from evals.evaluator import Group, TextSample
from kvjax.allocation import Allocation, Contest
from kvjax.sources import Reading, Source
from models.config import Config
from models.config_json import from_hugging_face
from models.families import Family


def vatp(*, power: float = 1.0) -> kvjax.Policy:
    """Score a token by its attention times the 1-norm of its value, to a power.

    VATP, arXiv 2406.12335.
    """

    def score(o: kvjax.Observation):
        # [B, K, S]
        size = jnp.sum(jnp.abs(o.value.astype(jnp.float32)), axis=-1)
        return o.columns.sum * size[:, :, None] ** power  # [B, K, G, S]

    return kvjax.base_score("vatp", score, statistics=("sum",))


def first_layers(*, extra: float = 0.5) -> Allocation:
    """Give the first half of the layers ``1 + extra`` times the budget, and
    the last half ``1 - extra`` times.
    """

    def keep(c: Contest):
        layer = jnp.arange(c.layers)
        lends = jnp.where(
            layer < c.layers // 2, 1,
            jnp.where(layer >= (c.layers + 1) // 2, -1, 0),
        )
        # [L, B]
        budgets = c.budget + lends[:, None] * (c.budget * extra).astype(
            jnp.int32
        )
        return c.best(
            "head",
            jnp.broadcast_to(budgets[..., None], (*budgets.shape, c.heads)),
        )

    return Allocation(
        "first_layers", keep, scope="head",
        most=lambda L, K, budget: int(budget * (1 + extra)),
    )


def key_size() -> Source:
    """Read the tokens with the largest keys, whatever the query."""

    def importance(_, reading: Reading):
        B, T, N, _ = reading.query.shape
        # [B, K, S]
        size = jnp.linalg.norm(reading.key.astype(jnp.float32), axis=-1)
        return jnp.broadcast_to(
            jnp.repeat(size, N // size.shape[1], axis=1)[:, :, None],
            (B, N, T, size.shape[2]),
        )

    return Source("key_size", importance, reads=frozenset({"key"}))


def wide_config(raw) -> Config:
    """Describe a model_type "wide_qwen": Qwen3, its size by another name."""
    return from_hugging_face(
        {
            **raw, "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": raw["width"],
        }
    )


wide_qwen = Family(
    wide_config, tensors={"layers.gate": "model.layers.{}.mlp.w1.weight"}
)


class FarBack:
    """A number at the beginning of a prompt: is it still known at its end?"""

    EXAMPLES = "examples:\n  python -m evals far_back --policies full,vatp\n"

    @staticmethod
    def add_flags(flags) -> None:
        """Add the command's flags."""
        command_line.add_model_flags(flags)
        command_line.add_setting_flags(flags)
        flags.add_argument(
            "--lengths", default="256",
            help="tokens of a prompt; several by comma",
        )
        flags.add_argument(
            "--samples", type=int, default=4, help="prompts of each length"
        )
        flags.add_argument(
            "--out",
            help="a folder for the results; a killed run is resumed there",
        )

    @staticmethod
    def check(flags) -> None:
        """Check the flags before the model is loaded."""
        command_line.check_sizes(flags)

    @staticmethod
    def make_groups(flags, config, tokenizer) -> list[Group]:
        """Return one group of samples for each length."""
        return [
            Group(
                "far back",
                length,
                flags.samples,
                functools.partial(
                    draw, tokenizer, length, flags.samples, flags.seed
                ),
                new_tokens=6,
                score=lambda answer, sample: float(
                    answer.text.strip().startswith(sample.references[0])
                ),
            )
            for length in command_line.check_sizes(flags)
        ]

    @classmethod
    def command(cls, flags) -> None:
        """Run the command."""
        evaluator.command(
            flags, cls.make_groups, title="A number far back",
            notes=lambda _: [], check=cls.check,
        )


def draw(tokenizer, length: int, count: int, seed: int) -> list[TextSample]:
    """Draw prompts from a seed: a number, prose, and a question about it."""
    samples = []
    for index in range(count):
        random = np.random.default_rng([seed, length, index])
        number = f"{random.integers(10_000):04d}"
        question = "\nQuestion: what is the code of amber falcon?\n"
        question += "Answer: the code of amber falcon is"
        asked = tokenizer.continuation(question)
        text = f"The code of amber falcon is {number}."
        sentences = prose.draw(random)
        while len(tokenizer.encode(text)) + len(asked) < length - 24:
            text += f" {next(sentences)}"
        context = tokenizer.encode(text)
        samples.append(TextSample([*context, *asked], len(context), (number,)))
    return samples
