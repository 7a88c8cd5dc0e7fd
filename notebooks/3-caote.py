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
# # CAOTE, from the theorem to the kernel
#
# Most scores ask how much attention a token gets. [CAOTE](https://arxiv.org/abs/2504.14051)
# asks how the output would change without the token. The exact answer costs one pass over the
# values. We derive it, check it by brute force, look at its effect in a real model, see where
# it is *not* exact, and end at the kernel that scores and evicts in one operation.
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
# ## The theorem
#
# A head's output is $X = \sum_j \alpha_j v_j$, with weights that sum to 1. If token $j$ is
# removed, softmax gives its weight to the others in proportion, so each of them is divided by
# $1 - \alpha_j$, and
#
# $$X' = \frac{X - \alpha_j v_j}{1 - \alpha_j}
# \qquad\Longrightarrow\qquad X' - X = \frac{\alpha_j}{1 - \alpha_j}\,(X - v_j).$$
#
# The output moves along the line through $v_j$ and $X$, away from $v_j$. The length of this
# step is the **eviction error**
#
# $$c_j = \frac{\alpha_j}{1 - \alpha_j}\,\lVert X - v_j \rVert,$$
#
# which is `kvjax.score(A, V)`. Two things make a token important: its weight, and a value
# that differs from the output. In the plane:

# %%
import matplotlib.pyplot as plt
import numpy as np
from jax import numpy as jnp

import kvjax

BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#777777"
V = np.array([[0.75, 1.05], [1.5, 1.4], [2.4, 0.3], [1.2, -0.9], [3.6, 2.2], [0.95, 0.3]])
alpha = np.array([0.20, 0.13, 0.12, 0.15, 0.10, 0.30])
X = alpha @ V
c = np.asarray(kvjax.score(jnp.array(alpha), jnp.array(V)))

figure, axes = plt.subplots(
    1, 2, figsize=(10, 4.2), layout="constrained", width_ratios=[1.35, 1]
)
plane, bars = axes
plane.scatter(*V.T, s=1800 * alpha, color=BLUE, alpha=0.35, linewidth=0)
for j, v in enumerate(V):
    moved = (X - alpha[j] * v) / (1 - alpha[j])
    plane.plot(*np.transpose([v, X]), color="#cccccc", linewidth=0.8, linestyle=":", zorder=0)
    plane.annotate("", moved, X, arrowprops=dict(arrowstyle="->", color=ORANGE, linewidth=1.6))
    plane.annotate(f"$v_{j}$", v, ha="center", va="center", fontsize=10)
plane.scatter(*X, color="black", s=28, zorder=4)
plane.annotate("$X$", X, xytext=(-9, -13), textcoords="offset points")
plane.set_title("values, sized by weight; where losing each moves the output", fontsize=10)
plane.set_aspect("equal")
place = np.arange(len(V))
bars.bar(place - 0.2, alpha / alpha.sum(), 0.38, color=BLUE, alpha=0.5, label="weight")
bars.bar(place + 0.2, c / c.sum(), 0.38, color=ORANGE, label="eviction error")
bars.set_xticks(place, [f"token {j}" for j in place], fontsize=8)
bars.set_title("shares of the sum", fontsize=10)
bars.legend(frameon=False)
for axis in axes:
    axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# Token 5 has the most weight, but its value is near the output. Losing it moves the output
# less than losing token 3 or 4, which have a half and a third of its weight. Token 4 has the
# least weight of all and matters most.
#
# ## Brute force agrees
#
# We evict each token, compute the softmax over the others again, and measure how far the
# output moved, all in float64:

# %%
random = np.random.default_rng(0)
logits, values = 2 * random.standard_normal(200), random.standard_normal((200, 64))


def output(logits, values):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum() @ values


whole = output(logits, values)
truth = np.array([
    np.linalg.norm(output(np.delete(logits, j), np.delete(values, j, axis=0)) - whole)
    for j in range(len(logits))
])  # fmt: skip
weights = jax.nn.softmax(jnp.array(logits, jnp.float32))
error = np.abs(np.asarray(kvjax.score(weights, jnp.array(values, jnp.float32))) / truth - 1)
print(f"{len(truth)} tokens, largest relative difference {error.max():.1e} in float32")
assert error.max() < 1e-4

# %% [markdown]
# ## Where the formula is delicate
#
# As $\alpha \to 1$ both $1 - \alpha$ and $X - v_j$ vanish. Float32 loses them to rounding,
# and their quotient is noise. But the change of the heaviest token can be written with the
# *others* alone: their mean, less the token's value. `score` does this. A token that holds
# all the weight scores the largest finite number, so it is never evicted.

# %%
rest = np.logspace(-9, -1, 65)  # what the heaviest token leaves to the other two
weight_rows = np.stack([1 - rest, 0.5 * rest, 0.5 * rest], axis=-1)
three = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 2.0]])
# Without it, the output is the mean of the others.
exact = (1 - rest) * np.linalg.norm(three[1:].mean(0) - three[0])

A, W = jnp.array(weight_rows, jnp.float32), jnp.array(three, jnp.float32)
naive = np.asarray(A[:, 0] / (1 - A[:, 0]) * jnp.linalg.norm(A @ W - W[0], axis=-1))
ours = np.asarray(kvjax.score(A, jnp.broadcast_to(W, (len(rest), 3, 2)))[:, 0])
whole = np.asarray(A[:, 0]) == 1  # in float32 it holds all the weight

figure, axis = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
axis.axvspan(rest[0], rest[whole].max(), color="#eeeeee")
axis.annotate("α rounds to 1:\nthe largest number", (1.3e-9, 1.22), fontsize=9, color=GREY)
shown = {"the formula as it stands": (naive, ORANGE, 1.2), "kvjax.score": (ours, BLUE, 2.2)}
for name, (found, colour, width) in shown.items():
    axis.plot(
        rest[~whole],
        found[~whole] / exact[~whole],
        color=colour,
        linewidth=width,
        label=f"{name}, float32",
    )
axis.set(
    xscale="log", xlabel=r"$1 - \alpha$", ylabel="error of losing it / exact", ylim=(0.5, 1.5)
)
axis.spines[["top", "right"]].set_visible(False)
axis.legend(frameon=False, loc="lower right")
plt.show()

# %% [markdown]
# ## On a real model
#
# We take the last query's attention in every layer and head of `retriever`, on a text of
# facts. `Decoder.run` takes the attention as an argument, so a function of three lines can
# read queries, keys and values.

# %%
import models
from evals import tasks

model, tokenizer = models.load("retriever")
sample = tasks.needle(5, tokenizer, 384, depth=0.4)
tokens = jnp.array([sample.tokens])
T = tokens.shape[1]


def dense(carry, layer, sliding_window, query, key, value):
    """Attention of a whole sequence; each layer gives out its last query, keys and values."""
    out = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return out, carry, (query[0, -1], key[0], value[0])


_, _, (query, key, value) = model.run(tokens, jnp.arange(T)[None], jnp.array([T]), dense, None)
L, N, D = query.shape
G = N // key.shape[2]
by_head = lambda x: jnp.repeat(x.transpose(0, 2, 1, 3), G, axis=1)  # [L, N, T, D]  # noqa: E731
key, value = by_head(key), by_head(value)
attention = jax.nn.softmax(jnp.einsum("lnd,lntd->lnt", query, key) / D**0.5)
errors = kvjax.score(attention, value)
print(f"{L} layers, {N} heads, {T} tokens")

# %%
share = lambda x: np.asarray(x / x.sum(-1, keepdims=True)).reshape(-1)  # noqa: E731
figure, axis = plt.subplots(figsize=(5.4, 4.4), layout="constrained")
image = axis.hexbin(
    share(attention),
    share(errors),
    xscale="log",
    yscale="log",
    gridsize=45,
    bins="log",
    cmap="Blues",
)
ends = [1e-8, 1]
axis.plot(ends, ends, color=ORANGE, linewidth=1)
axis.set(
    xlabel="share of the attention", ylabel="share of the eviction errors", xlim=ends, ylim=ends
)
axis.set_title("every token in every head", fontsize=10)
figure.colorbar(image, label="tokens")
plt.show()

# %% [markdown]
# Along the line the two orders agree. The tokens below it have values close to the head's
# output: attention would keep them, CAOTE evicts them. The values of the tokens above it
# differ from the output. Does this help? We keep b tokens of each head by four scores, evict
# all others at once, and measure how far the output is from that of all tokens.
# CAOTE loses here to plain attention where few tokens stay, and wins only where most do; why
# is said below the picture:

# %%
live = jnp.broadcast_to(jnp.arange(T), attention.shape)


def relative_error(scores, budget):
    """|output of the kept tokens - output of all| / |output of all|, the mean over heads."""
    kept = jnp.where(kvjax.keep_mask(scores, live, budget), attention, 0)
    left = jnp.einsum("lnt,lntd->lnd", kept / kept.sum(-1, keepdims=True), value)
    full = jnp.einsum("lnt,lntd->lnd", attention, value)
    return float(
        jnp.mean(jnp.linalg.norm(left - full, axis=-1) / jnp.linalg.norm(full, axis=-1))
    )


budgets = [8, 16, 32, 64, 128, 256]
curves = {
    "attention": [relative_error(attention, b) for b in budgets],
    "FastCAOTE": [relative_error(kvjax.score(attention, value, fast=True), b) for b in budgets],
    "CAOTE": [relative_error(errors, b) for b in budgets],
}
figure, axis = plt.subplots(figsize=(7.6, 3.4), layout="constrained")
for (name, curve), colour in zip(curves.items(), (GREY, GREEN, BLUE), strict=True):
    axis.plot(
        budgets,
        np.divide(curve, curves["attention"]),
        color=colour,
        marker="o",
        markersize=4,
        label=name,
    )
axis.set(xscale="log", xlabel=f"tokens kept, of {T}", ylabel="error / that of attention")
axis.set_xticks(budgets, budgets)
axis.minorticks_off()
axis.grid(color="#eeeeee")
axis.spines[["top", "right"]].set_visible(False)
axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()
print("tokens kept          " + "".join(f"{b:8}" for b in budgets))
for name, curve in curves.items():
    print(f"{name:21}" + "".join(f"{x:8.4f}" for x in curve))

# %% [markdown]
# ## Where it is no longer exact
#
# For this one query, CAOTE in one go is no better than plain attention if most tokens are
# evicted, and better only if few are. The theorem is about *one* token. When many are evicted
# together, CAOTE scores each as if it were the only one, but each eviction changes $X$ and
# the weights of the others. Scoring anew after each token that leaves would follow this, at
# the price of as many passes as tokens; and a greedy order need not end at the best set.
#
# ## Grouped heads
#
# With grouped queries, G heads share a slot. Losing it changes all their outputs at once, so
# the error is the length of the G changes together,
#
# $$c_j = \sqrt{\sum_g
# \Big(\frac{\alpha_{gj}}{1 - \alpha_{gj}}\Big)^2 \lVert X_g - v_j \rVert^2},$$
#
# which is `group="exact"`. The published code averages the weights over the group first,
# `group="mean"`. Brute force again shows which one is the error:

# %%
# Four heads, one set of values.
weights = jax.nn.softmax(2 * jax.random.normal(jax.random.key(1), (4, 100)))
shared = jax.random.normal(jax.random.key(2), (100, 32))


def without(j):
    left = jnp.delete(weights, j, axis=1)
    return jnp.linalg.norm(
        left / left.sum(1, keepdims=True) @ jnp.delete(shared, j, axis=0) - weights @ shared
    )


truth = np.array([without(j) for j in range(100)])
for group in ("exact", "mean"):
    found = np.asarray(kvjax.score(weights, shared, group=group))
    order = np.corrcoef(np.argsort(np.argsort(found)), np.argsort(np.argsort(truth)))[0, 1]
    largest = np.abs(found / truth - 1).max()
    print(
        f"group={group!r}: rank correlation with the truth {order:.3f}, "
        f"largest error {largest:.1e}"
    )

# %% [markdown]
# ## The eviction: a selection without a sort
#
# An eviction drops the tokens with the lowest scores. It needs the b-th largest score of a
# row, not an order. Floats read as integers keep their order, so the b-th largest is found
# bit by bit: for each bit, count how many scores are at least the current number. This takes
# 32 counts, or 31 if no score is negative, as here. The result is exact, ties go to the more
# recent token, and it is plain arithmetic, the same on every machine and inside a kernel.

# %%
row = np.asarray(errors[2, 1])
bits = row.view(np.int32)  # non-negative floats are ordered like their bits
budget, number, seen = 64, 0, []
for bit in reversed(range(31)):
    candidate = number | (1 << bit)
    count = int((bits >= candidate).sum())
    number = candidate if count >= budget else number
    seen.append(
        (np.int32(candidate).view(np.float32), count, np.int32(number).view(np.float32))
    )
threshold = np.int32(number).view(np.float32)
assert threshold == np.sort(row)[-budget]

figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
steps = np.arange(1, 32)
axes[0].step(steps, [count for _, count, _ in seen], where="mid", color=BLUE)
axes[0].axhline(budget, color=ORANGE, linewidth=1)
axes[0].annotate(
    f"b = {budget}",
    (24, budget),
    xytext=(0, 4),
    textcoords="offset points",
    color=ORANGE,
    fontsize=9,
)
axes[0].set(
    xlabel="bit",
    ylabel="scores that reach the number",
    title="thirty-one counts instead of a sort",
)
axes[1].plot(
    np.arange(T), row, linestyle="none", marker=".", markersize=4, color=GREY, label="leaves"
)
stays = row >= threshold
axes[1].plot(
    np.arange(T)[stays],
    row[stays],
    linestyle="none",
    marker=".",
    markersize=5,
    color=BLUE,
    label="stays",
)
axes[1].axhline(threshold, color=ORANGE, linewidth=1)
axes[1].set(yscale="log", xlabel="token", ylabel="eviction error", title="layer 2, head 1")
axes[1].legend(frameon=False)
for axis in axes:
    axis.title.set_fontsize(10)
    axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## The kernel
#
# `caote_topk` combines these steps: it takes weights and values and returns the freed slots.
# The reference is the definition in plain JAX. The Pallas kernel for a TPU keeps a head's
# values in the chip's fast memory between the two passes (one for $X$, one for $\lVert X -
# v_j \rVert$), so V is read from HBM once and no score is written. Here it runs in Pallas'
# interpreter, on one layer of our attention and values, and frees the same slots:

# %%
from kernels_pallas import caote_topk
from kernels_pallas.dispatch import Kernel

layer = 2
weights = attention[layer].reshape(1, N // G, G, T)
values = value[layer, ::G][None]  # [B, K, S, D]
position = jnp.broadcast_to(jnp.arange(T), values.shape[:3])
reference = caote_topk(weights, values, position, 64)
options = dict(
    fast=False, norm=2, group="exact", excess=None, with_scores=False, interpret=True
)
kernel = Kernel("caote_topk", "tpu").run(
    weights, values, position, jnp.array([64]), None, **options
)
assert (kernel.position == reference.position).all()
print(
    f"{int((kernel.position >= 0).sum())} slots stay in {N // G} heads, "
    "the same ones by kernel and reference"
)

# %% [markdown]
# An interpreter shows that the arithmetic is right, not that the kernel lowers. Any machine
# can show that too: below, the same call is lowered for a TPU v5e and an H100 that are not
# present. On a GPU it takes four kernels: outputs, distances, scores, selection.

# %%
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

shape = jax.ShapeDtypeStruct
arguments = (
    shape((1, 8, 4, 8320), jnp.float32),
    shape((1, 8, 8320, 128), jnp.bfloat16),
    shape((1, 8, 8320), jnp.int32),
)
devices = {
    "tpu": (AbstractDevice("TPU v5e", 1, "tpu"), "@tpu_custom_call"),
    "cuda": (AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu"), "@__gpu$xla.gpu.triton"),
}
for platform, (device, call) in devices.items():
    mesh = AbstractMesh((1,), ("heads",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        program = (
            jax.jit(lambda *x: caote_topk(*x, 8192))
            .trace(*arguments)
            .lower(lowering_platforms=(platform,))
        )
    print(f"{device.device_kind:22} {program.as_text().count(call)} kernel(s)")

# %% [markdown]
# The table shows what a step of Llama-3.1-8B's layer reads and writes (8 KV heads of 4 query
# heads, 8,320 slots of dimension 128, bfloat16), counted from shapes, next to the same
# computation written with arrays between its parts:

# %%
K, S, D = 8, 8320, 128
V_bytes, weight_bytes, score_bytes = 2 * K * S * D, 4 * K * 4 * S, 4 * K * S
difference = 4 * K * 4 * S * D  # X - v for each query head, float32, written and read again
parts = {
    "written out": {
        "values": 2 * V_bytes,
        "weights": 2 * weight_bytes,
        "X - v": 2 * difference,
        "scores": 3 * score_bytes,
    },
    "GPU kernels": {
        "values": 2 * V_bytes,
        "weights": 2 * weight_bytes,
        "X - v": 0,
        "scores": 2 * score_bytes,
    },
    "TPU kernel": {"values": V_bytes, "weights": weight_bytes, "X - v": 0, "scores": 0},
}
figure, axis = plt.subplots(figsize=(6.4, 2.2), layout="constrained")
for row_name, found in parts.items():
    left = 0.0
    for (name, size), colour in zip(
        found.items(), (BLUE, "#56b4e9", ORANGE, GREEN), strict=True
    ):
        axis.barh(
            row_name,
            size / 2**20,
            left=left,
            color=colour,
            label=name if row_name == "written out" else None,
        )
        left += size / 2**20
    axis.annotate(f" {left:.0f} MiB", (left, row_name), va="center", fontsize=9)
axis.invert_yaxis()
axis.set_xlim(0, 330)
axis.set_xlabel("MiB through the memory, a layer")
axis.spines[["top", "right"]].set_visible(False)
axis.legend(frameon=False, fontsize=8, loc="lower right")
plt.show()

# %% [markdown]
# These are counts, not measurements: XLA may fuse a part of what is "written out".
# Measurements and their devices are in `benchmarks/`.
#
# Next: [train a predictor](4-train-a-predictor.ipynb), which evicts nothing and reads a part.
