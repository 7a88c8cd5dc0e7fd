# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Reinforcement learning with rollouts longer than memory
#
# In reinforcement learning a model writes long answers, many at once, and is then trained on
# them. While it writes, its KV cache is what fills the memory. Under a budget the rollouts
# may be of any length. But the policy that writes is then not the one that is trained: it has
# evicted what the learner still sees. Training has to account for that
# ([Sparse-RL](https://arxiv.org/abs/2601.10079),
# [keys_values](https://arxiv.org/abs/2608.19920)).
#
# In this notebook the GRPO learner of [Tunix](https://github.com/google/tunix) trains a tiny
# random model on one CPU, in two minutes. Its rollouts run with the full cache, and under a
# budget. Tunix's code stays as it is.
#
# The first cell installs kvjax and Tunix where they are missing: kvjax from the checkout that
# this notebook is in, else from the wheel that the environment variable `KVJAX_WHEEL` names
# (or a `git+` URL), else from a wheel beside this notebook. Take an environment of its own:
# Tunix asks for older versions of some packages than kvjax's tests use.

# %%
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

extras = "plot"  # and what this runtime needs: "cuda" on a GPU, "tpu" on a TPU
needed = ["kvjax", "flax", "jaxtyping", "tokenizers", "matplotlib", "tunix"]
above = [Path.cwd(), *Path.cwd().parents]
checkout = next((path for path in above if (path / "kvjax" / "__init__.py").is_file()), None)
if checkout:
    sys.path.insert(0, str(checkout))  # pip's link to it is read by the next kernel only
beside = max(map(str, Path.cwd().glob("kvjax-*.whl")), default=None)
source = str(checkout or os.environ.get("KVJAX_WHEEL") or beside or "")


class Missing(Exception):
    def _render_traceback_(self):  # what a notebook shows of it: its sentence alone
        return [str(self)]


if all(map(importlib.util.find_spec, needed)):
    print("kvjax is installed" + (", from this checkout" if checkout else ""))
elif not source:
    raise Missing(
        "kvjax is not here: put its wheel (kvjax-*.whl) beside this notebook, or name a wheel "
        "or a git+ URL in KVJAX_WHEEL, and run this cell again."
    )
else:
    if shutil.which("nvidia-smi"):
        extras += ",cuda"
    elif any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("[0-9]*")):
        extras += ",tpu"
    of_url = f"kvjax[{extras}] @ {source}"  # pip names a thing at a URL, and not a file
    named = of_url if "://" in source else f"{source}[{extras}]"
    options = ["--quiet", *(["-e"] if checkout else []), named, "google-tunix==0.1.7"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options], check=True)
    print(f"kvjax was installed from {source}")

# %%
import warnings
from importlib.metadata import version

warnings.filterwarnings("ignore")  # Tunix's own, such as of a TPU that is not here

import jax
from absl import logging

from models import commands

commands.keep_compiled()  # for the next start
logging.set_verbosity(logging.ERROR)

print(f"{jax.device_count()} device(s): {jax.devices()[0].device_kind}")
print(*(f"{name} {version(name)}" for name in ("google-tunix", "jax", "flax")), sep=", ")

# %% [markdown]
# ## A task, a model, and two caches
#
# A prompt has 32 tokens: filler, and among its first twelve tokens one of eight symbols. The
# model should say the symbol, eight times. The reward is the share of its tokens that are the
# symbol, so chance is 1/32 at first. Tokens are numbers, and the tokenizer reads numbers.

# %%
import numpy as np
from flax import nnx
from tunix.models.qwen3 import model as qwen3

from models.outside import tunix
from models.outside.keep import nbytes

SYMBOLS, WORDS, PROMPT, NEW = range(2, 10), 32, 32, 8
BUDGET, BLOCK = 12, 8


class Numbers:
    """Read and write numbers as tokens. All texts have one length: none is padded or ended."""

    def encode(self, text, **how):
        return [int(word) for word in text.split()]

    def decode(self, tokens, **how):
        return " ".join(str(int(token)) for token in tokens)

    def bos_id(self):
        return 0  # none is put first

    def eos_id(self):
        return WORDS  # in no text

    def pad_id(self):
        return WORDS + 1  # in no text; what a model says is never taken for padding


def prompts(seed, rows):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(SYMBOLS.stop, WORDS, (rows, PROMPT))
    tokens[np.arange(rows), rng.integers(4, 12, rows)] = rng.integers(2, 10, rows)
    return np.array([Numbers().decode(row) for row in tokens])


def reward(prompts, completions, **given):
    symbols = [next(w for w in text.split() if int(w) in SYMBOLS) for text in prompts]
    said = zip(symbols, completions, strict=True)
    return [text.split().count(symbol) / NEW for symbol, text in said]


sizes = dict(num_layers=1, embed_dim=64, hidden_dim=64, num_heads=4, num_kv_heads=2)
shape = qwen3.ModelConfig(
    **sizes, head_dim=16, vocab_size=WORDS, rope_theta=10_000, norm_eps=1e-6
)


def made(policy):
    """A random model of Tunix, whose sampler's cache holds a budget if there is a policy."""
    model = qwen3.Qwen3(shape, rngs=nnx.Rngs(0))
    if policy == "full cache":
        return model
    return tunix.under_budget(model, policy=policy, budget=BUDGET, block=BLOCK)


for length in (PROMPT + NEW, 32_768):
    for policy in ("full cache", "h2o+caote"):
        taken = nbytes(made(policy).init_cache(1, length, shape.dtype))
        print(f"{length:6,} tokens, {policy:10} {taken:10,} bytes per row")

# %% [markdown]
# `under_budget` changes what the sampler's cache is. Without a cache, as the learner calls it,
# the model sees everything, and is Tunix's own. So one model is both, with one set of weights.
#
# ## Who wrote the rollout?
#
# GRPO raises the probability of what was better than the group's mean. Its loss weighs each
# token by a *ratio*: the learner's probability of the token, over that of whoever wrote it. It
# clips the ratio to 0.8 to 1.2, since a sample tells little about a policy that would seldom
# have written it. Tunix's `VanillaRollout` takes the denominator from the learner's own pass
# over the finished text, without a cache. That is right for a full cache. Under a budget the
# tokens came from other probabilities: those after eviction, which the sampler knows.
#
# `RLCluster` takes a class of ours as its rollout engine. This one is Tunix's, and answers
# with the probabilities that the tokens were drawn with. Now the ratio corrects for eviction.

# %%
import dataclasses

import jax.numpy as jnp
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout


class OwnWords(VanillaRollout):
    """A rollout that reports the probabilities that it has drawn with."""

    def __init__(self, rollout_actor, tokenizer, mesh, rollout_config):
        of, length = rollout_actor.config, rollout_config.kv_cache_size
        cache = CacheConfig(length, of.num_layers, of.num_kv_heads, of.head_dim)
        super().__init__(rollout_actor, tokenizer, cache)
        self.calls = 0

    def generate(self, prompts, rollout_config, **how):
        self.calls += 1  # else Tunix draws the same random numbers in each step
        config = dataclasses.replace(rollout_config, seed=self.calls, return_logprobs=True)
        out = super().generate(prompts, config, **how)
        self.drawn_with = jnp.array(out.logprobs)
        return out

    def get_per_token_logps(self, prompt_tokens, completion_tokens):
        return self.drawn_with


class LearnersWords(OwnWords):
    """The same, with Tunix's own answer: what the learner thinks of the tokens."""

    get_per_token_logps = VanillaRollout.get_per_token_logps


# %% [markdown]
# ## Train
#
# Each step draws 16 prompts, writes 8 answers to each, and updates the weights twice
# (`num_iterations=2`; with 1, GRPO takes every ratio to be 1 and asks nobody).

# %%
import contextlib
import io

import optax
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner

STEPS = 60
mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.ROLLOUT)
rollouts = RolloutConfig(
    max_prompt_length=PROMPT,
    max_tokens_to_generate=NEW,
    kv_cache_size=PROMPT + NEW,
    temperature=1.0,
)


def trained(policy, engine):
    """The weights after GRPO, and the mean reward of each step's rollouts."""
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine=engine,
        rollout_config=rollouts,
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adam(3e-3),
            eval_every_n_steps=STEPS * 10,
            max_steps=STEPS * 2,
        ),
    )
    curve = []

    def noted(**given):
        rewards = reward(**given)
        curve.append(np.mean(rewards))
        return rewards

    with contextlib.redirect_stderr(io.StringIO()):  # Tunix's progress bar
        cluster = rl_cluster.RLCluster(
            actor=made(policy), tokenizer=Numbers(), cluster_config=config
        )
        how = GRPOConfig(num_generations=8, num_iterations=2, beta=0.0)
        GRPOLearner(cluster, how, noted).train(
            [{"prompts": prompts(step, 16)} for step in range(STEPS)]
        )
    return nnx.variables(cluster.actor_trainer.model), curve


runs = {
    "full cache": ("full cache", OwnWords),
    "h2o+caote": ("h2o+caote", OwnWords),
    "h2o+caote, not corrected": ("h2o+caote", LearnersWords),
    "streaming": ("streaming", OwnWords),
}
weights, curves = {}, {}
for name, how in runs.items():
    weights[name], curves[name] = trained(*how)
    first, last = np.mean(curves[name][:5]), np.mean(curves[name][-5:])
    print(f"{name:26} reward of the rollouts {first:.2f} -> {last:.2f}")

# %%
import matplotlib.pyplot as plt

figure, axis = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
for (name, curve), colour in zip(
    curves.items(), ("#555555", "#0072b2", "#56b4e9", "#d55e00"), strict=True
):
    axis.plot(np.convolve(curve, np.ones(5) / 5, "valid"), color=colour, label=name)
axis.set(xlabel="step", ylabel="reward", title="rollouts, mean of five steps", ylim=(0, 1))
axis.title.set_fontsize(10)
axis.spines[["top", "right"]].set_visible(False)
axis.legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# ## Reward and mismatch, before and after
#
# 256 prompts that were not trained on. Each model answers with the full cache, and under the
# budget that it was trained with. The mismatch is between the learner and the rollout, on the
# rollout's tokens: the share whose ratio is outside of GRPO's 0.8 to 1.2, and the largest
# ratio.

# %%
from tunix.generate.sampler import Sampler
from tunix.rl import common

held_out = prompts(10_000, 256)
cache = CacheConfig(PROMPT + NEW, shape.num_layers, shape.num_kv_heads, shape.head_dim)
untrained = nnx.variables(made("full cache"))
samplers = {
    policy: Sampler(made(policy), Numbers(), cache)
    for policy in ("full cache", "h2o+caote", "streaming")
}


def answered(policy, state):
    """The reward of answers, and each token's ratio of the learner to the rollout."""
    sampler = samplers[policy]
    sampler.transformer_state = jax.device_put(state, jax.devices()[0])
    sampling = dict(temperature=1.0, top_p=1.0, seed=0, return_logprobs=True)
    out = sampler(list(held_out), NEW, max_prompt_length=PROMPT, **sampling)
    tokens = jnp.array(out.padded_prompt_tokens), jnp.array(out.tokens)
    learner = common.compute_per_token_logps(
        *nnx.split(sampler.transformer), *tokens, pad_id=WORDS + 1, eos_id=WORDS
    )
    ratio = np.exp(np.array(learner) - np.array(out.logprobs))
    return np.mean(reward(held_out, out.text)), ratio


print(f"{'trained with':26}{'answers with':14}{'reward':>14}{'outside':>12}{'largest':>10}")
for name, (policy, _) in runs.items():
    for where in dict.fromkeys((policy, "full cache")):
        before, _ = answered(where, untrained)
        after, ratio = answered(where, weights[name])
        outside = np.mean((ratio < 0.8) | (ratio > 1.2))
        print(
            f"{name:26}{where:14}{before:6.2f} -> {after:.2f}{outside:12.1%}{ratio.max():10.2g}"
        )

# %% [markdown]
# With the full cache learner and rollout agree on each token. Under `h2o+caote` the rollout
# keeps 12 of 40 tokens and still learns, more slowly. The learner would seldom have written
# some of its tokens, and others far more often. Left alone, this mismatch grows: with Tunix's
# own denominator it covers twice as many tokens, and a single ratio is 220. With the
# probabilities that the tokens were drawn with it stays smaller. The rewards of the two differ
# by less than one run can tell. `streaming` forgets the symbol: no answer is better than
# another, and no ratio brings that back. So look at the rollout's reward first, and then at
# its ratios. This is one run of a tiny model: it shows how to do it, not how much it gives.
#
# Next: [other packages' decoders](../docs/how-to/other-decoders.md).
