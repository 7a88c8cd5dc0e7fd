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
# # Your own score in ten lines, and a race
#
# A policy is a chain: a **base score** says what each token in the cache is worth, and the
# **links** after it change the scores. In this notebook we write a base score that is not
# built in, check it against its formula in NumPy, chain it, and compare it with two others on
# the same forty questions.
#
# The first cell installs kvjax where it is missing: from the checkout that this notebook is
# in, else from the wheel that the environment variable `KVJAX_WHEEL` names (or a `git+` URL),
# else from a wheel beside this notebook.

# %%
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

extras = "plot"  # and what this runtime needs: "cuda" on a GPU, "tpu" on a TPU
needed = ["kvjax", "flax", "jaxtyping", "tokenizers", "matplotlib"]
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
    options = ["--quiet", *(["-e"] if checkout else []), named]
    subprocess.run([sys.executable, "-m", "pip", "install", *options], check=True)
    print(f"kvjax was installed from {source}")

# %%
import jax

from models import commands

commands.keep_compiled()  # for the next start

print(f"{jax.device_count()} device(s): {jax.devices()[0].device_kind}")

# %% [markdown]
# ## The idea
#
# SnapKV keeps the tokens to which the last queries of the prompt attend *on average*. A token
# to which one of these queries attends strongly, and the other 31 not at all, scores a
# thirty-second of its weight. So we take the root mean square instead: $\sqrt{\frac1w \sum_i
# a_{ij}^2}$ over the window's $w$ queries. It lies between the mean and the maximum, so a
# single strong weight counts more.
#
# A score never sees the attention matrix. It names the **column statistics** that it needs,
# and attention computes only those. So memory does not grow, and a fused kernel can compute
# them. `"window_square"`, the sum of squares over the window, is one of them.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import kvjax
import models
from evals import statistics, tasks

WINDOW = 32


def sharpness(o: kvjax.Observation):
    """[B, K, G, S]: a score per query head of a KV head and slot. Larger means: keep."""
    return jnp.sqrt(o.columns.window_square / WINDOW)


sharp = kvjax.base_score(
    "sharp",
    sharpness,
    statistics=("window_square",),
    window=WINDOW,
    protection=kvjax.Protection(recent=WINDOW),
)

# %% [markdown]
# This is the whole score. `protection` says which tokens stay whatever they score: here those
# of the window itself, as in SnapKV.
#
# ## Check it against the formula
#
# We run one block of random queries, keys and values through `kvjax.attend` and compare it
# with the formula in float64:

# %%
T, D, budget = 48, 8, 40
q, k, v = (
    jax.random.normal(jax.random.key(i), (1, T, heads, D)) for i, heads in enumerate((2, 1, 1))
)
cache = kvjax.empty_cache(sharp, kv_heads=1, query_heads=2, head_dim=D, budget=budget, block=T)
_, cache = kvjax.attend(cache, q, k, v, policy=sharp, budget=budget)

logits = np.einsum(
    "tnd,sd->nts", *(np.asarray(x, np.float64) for x in (q[0], k[0, :, 0]))
) / np.sqrt(D)
a = np.exp(np.where(np.tril(np.ones((T, T))), logits, -np.inf))
a /= a.sum(-1, keepdims=True)
worth = np.sqrt((a[:, -WINDOW:] ** 2).mean(1)).mean(0)  # of both query heads
worth[-WINDOW:] = np.inf

kept = set(np.flatnonzero(np.asarray(cache.position[0, 0]) >= 0))
assert kept == set(np.argsort(worth)[-budget:])
print(
    f"{len(kept)} tokens kept, the same as the formula's; lost: {sorted(set(range(T)) - kept)}"
)

# %% [markdown]
# ## Chain it
#
# Two built-in links may follow the score. `pool` lets neighbours share a score, so that a
# number is not kept without its digits. `caote` turns any non-negative score into the change
# of the attention output that losing the token would cause.
#
# Make a policy once and pass the same object each time, so that `jit` finds the compiled
# program. Short names such as `"snapkv+caote"` do this themselves.

# %%
policies = {
    "recency": kvjax.parse("recency"),
    "snapkv": kvjax.parse("snapkv"),
    "sharp": sharp,
    "sharp+pool": kvjax.chain(sharp, kvjax.pool()),
    "sharp+pool+caote": kvjax.chain(sharp, kvjax.pool(), kvjax.caote()),
}

# %% [markdown]
# ## The race
#
# There are forty prompts of 384 tokens. Each has ten facts, one of which is asked for at the
# end. All policies answer the same prompts and evict once, when the question is known. An
# answer counts if all four digits are right.

# %%
model, tokenizer = models.load("retriever")
samples = [
    tasks.needle(seed, tokenizer, 384, depth)
    for depth in np.linspace(0, 1, 5)
    for seed in range(8)
]
lengths = np.array([len(sample.tokens) for sample in samples])
tokens = np.zeros((len(samples), lengths.max()), np.int32)
for row, sample in enumerate(samples):
    tokens[row, : lengths[row]] = sample.tokens


def race(policy, budget):
    """Which of the prompts a policy answers right."""
    out = models.generate(
        model,
        tokens,
        lengths=lengths,
        policy=policy,
        budget=budget,
        when="prompt",
        evict_every=0,
        max_new_tokens=4,
        end=(),
    )
    said = np.asarray(out.tokens)
    return [
        row[: len(s.answer_tokens)].tolist() == s.answer_tokens
        for row, s in zip(said, samples, strict=True)
    ]


budgets = (64, 96, 144)
full = np.mean(race("full", None))
right = {
    name: {budget: race(policy, budget) for budget in budgets}
    for name, policy in policies.items()
}
print(f"full cache: {full:.2f}")
print(f"{'budget':18}" + "".join(f"{budget:6}" for budget in budgets))
for name, found in right.items():
    print(f"{name:18}" + "".join(f"{np.mean(found[budget]):6.2f}" for budget in budgets))

# %%
colours = ["#999999", "#56b4e9", "#cc79a7", "#d55e00", "#009e73"]
figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
axis.axhline(full, color="#555555", linestyle="--", linewidth=1, label="full cache")
place = np.arange(len(budgets))
for number, ((name, found), colour) in enumerate(zip(right.items(), colours, strict=True)):
    mean = np.array([np.mean(found[budget]) for budget in budgets])
    interval = np.transpose(
        [statistics.wilson(sum(found[budget]), len(samples)) for budget in budgets]
    )
    beside = place + 0.07 * (number - 2)  # side by side, so that none hides another
    axis.plot(beside, mean, color=colour, linewidth=0.8, alpha=0.5)
    axis.errorbar(
        beside,
        mean,
        abs(interval - mean),
        color=colour,
        fmt="o",
        markersize=4,
        capsize=2,
        label=name,
    )
axis.set(xlabel="slots per head, of 384 tokens", ylabel="answered right", ylim=(-0.03, 1.03))
axis.set_xticks(place, budgets)
axis.grid(axis="y", color="#eeeeee")
axis.spines[["top", "right"]].set_visible(False)
axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# The bars are 95% intervals of each policy alone. The newest tokens answer what is near the
# end, one or two of the five depths. `sharp` alone does no better: it keeps single tokens, and
# a number without its digits is no answer.
#
# The bars are wide. But the policies answered the *same* prompts, so their differences are
# known better than their levels. A fair comparison is paired, over all three budgets:

# %%
for one, other in (
    ("sharp+pool", "snapkv"),
    ("sharp+pool", "sharp"),
    ("sharp+pool+caote", "sharp+pool"),
):
    first, second = (
        np.mean([right[name][budget] for budget in budgets], axis=0) for name in (one, other)
    )
    per_sample = first - second
    mean, low, high = statistics.paired_interval(per_sample.tolist())
    print(
        f"{one:17} against {other:11}: {mean:+.2f} [{low:+.2f}, {high:+.2f}], "
        f"{statistics.verdict(low, high)}"
    )

# %% [markdown]
# "yes" and "no" are differences beyond 95% noise. The new score gains where neighbours share
# it, and again by `caote`. With the same five neighbours it is ahead of SnapKV's mean on these
# prompts; `snapkv(kernel=13)`, which has more neighbours, was chosen on such prompts. One
# small model and one task give a hint, not a result: `python -m evals ruler`, `longbench` and
# `perplexity` run any policy with a short name on more.
#
# ## What next
#
# - A short name for command lines: put a function that makes the policy into
#   `kvjax/_src/scores.py`, decorated with `@register`.
# - Scores with state from block to block, and what else an `Observation` holds: [Add a
#   score](../docs/how-to/add-a-score.md).
# - Heads that compete for slots: `sharp @ "layer"`, and [Add an
#   allocation](../docs/how-to/add-an-allocation.md).
#
# Next: [CAOTE from the theorem to the kernel](3-caote.ipynb).
