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
# # Quickstart
#
# A decoder stores a key and a value for every token that it has read, in every layer and
# head. This cache grows with the prompt until it no longer fits in memory. kvjax keeps it
# within a **budget**: a fixed number of tokens per head, however long the prompt is. A
# **policy** decides which tokens stay.
#
# In this notebook a small model answers a question about a text under a budget, and we look
# at what it kept. Nothing is downloaded: `retriever`, a model of 1.8 million parameters that
# can look facts up, is in the package.
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
# ## Load a model and generate
#
# `models.load` also takes a Hugging Face folder or hub name:
# `models.load("path/to/Llama-3.2-1B-Instruct")`.

# %%
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML

import kvjax
import models
from evals import tasks, view

model, tokenizer = models.load("retriever")
question = "Question: what is the code of amber falcon?\nAnswer: the code of amber falcon is"
prompt = f"The code of amber falcon is 4719. The river was calm. {question}"
out = models.generate(model, [tokenizer.encode(prompt)], max_new_tokens=4)
print(tokenizer.decode(out.tokens[0].tolist()))

# %% [markdown]
# That run used the full cache. With longer text a budget makes a difference. The sample below
# hides the code that it asks for among seven other facts and prose. Each head may keep 96 of
# 512 tokens. `snapkv` keeps the tokens to which the end of the prompt attends, and some of
# their neighbours; `snapkv(kernel=13)` takes the number of neighbours that did best on prompts
# like these. `caote` changes the order by how much the attention output would change if a token
# were lost.

# %%
sample = tasks.needle(3, tokenizer, 512, depth=0.35, facts=8)
print(f"{len(sample.tokens)} tokens, the last of them:", sample.prompt[-85:], sep="\n")


def answer(policy, budget, **settings):
    out = models.generate(
        model,
        [sample.tokens],
        policy=policy,
        budget=budget,
        block=64,
        max_new_tokens=4,
        end=(),
        **settings,
    )
    return tokenizer.decode(out.tokens[0].tolist()), out.cache


settings = {
    "full cache": ("full", None, "block"),
    "first four and newest": ("streaming", 96, "block"),
    "snapkv(kernel=13)+caote, by block": ("snapkv(kernel=13)+caote", 96, "block"),
    "snapkv(kernel=13)+caote, once": ("snapkv(kernel=13)+caote", 96, "prompt"),
}
caches = {}
print(f"\nThe right answer is {sample.answer}.\n")
for name, (policy, budget, when) in settings.items():
    said, caches[name] = answer(policy, budget, when=when)
    print(f"{name:37} {said!r:8} {caches[name].nbytes / 2**20:5.2f} MiB")

# %% [markdown]
# The results show four things:
#
# - The budget fixes the memory: the cache's size does not depend on the prompt.
# - Keeping the newest tokens forgets what is far back.
# - *By block* (`when="block"`) evicts while the prompt comes in. The prompt may then be of any
#   length, but the early parts are evicted before the question comes.
# - *Once* (`when="prompt"`) evicts after the whole prompt, with its question, has been read.
#   It needs memory for the whole prompt for a moment, and is a much easier problem. Above, the
#   policy that did not know the question answers wrong.
#
# ## Look at what was kept
#
# A cache knows the position in the text of each token that it holds (`cache.position`);
# `evals.view` turns positions into a mask. Each row below is one KV head of one layer, each
# column a token of the prompt.

# %%
# Where in the text the answer stands.
fact = tokenizer.decode(sample.tokens).find(sample.answer)
ends = np.cumsum([len(piece) for piece in view.pieces(tokenizer, sample.tokens[1:])])
at = int(np.searchsorted(ends, fact, side="right")) + 1


def kept(name):
    """Which tokens of the prompt each layer and head holds, [L, K, tokens]."""
    T = len(sample.tokens)
    return view.held_tokens(caches[name], T + 4)[..., :T]


names = [name for name in settings if name != "full cache"]
figure, axes = plt.subplots(len(names), 1, figsize=(9, 5.6), sharex=True, layout="constrained")
for axis, name in zip(axes, names, strict=True):
    held = kept(name)
    L, K, T = held.shape
    axis.imshow(
        held.reshape(L * K, T),
        aspect="auto",
        cmap="Blues",
        interpolation="nearest",
        vmin=0,
        vmax=1.3,
    )
    axis.axvspan(at - 0.5, at + 3.5, color="#d55e00", alpha=0.45, linewidth=0)
    axis.set_yticks(
        np.arange(0, L * K, K), [f"layer {layer}" for layer in range(L)], fontsize=7
    )
    axis.set_title(
        f"{name}: {held.sum(-1).mean():.0f} of its tokens per head", fontsize=9.5, loc="left"
    )
axes[-1].set_xlabel("place in the prompt; the digits of the answer in orange")
plt.show()

# %% [markdown]
# The same as text: the darker a token, the more of the twelve heads still hold it. Tokens
# without a mark are in no head.


# %%
def shaded(name):
    share = kept(name).mean((0, 1))
    pieces = [
        f'<span style="background:rgba(0,114,178,{0.75 * held:.2f})">{piece}</span>'
        for piece, held in zip(view.pieces(tokenizer, sample.tokens), share, strict=True)
    ]
    text = "".join(pieces[1:]).replace("\n", "<br>")
    return HTML(f'<p style="line-height:1.7">{text}</p>')


shaded("snapkv(kernel=13)+caote, once")

# %% [markdown]
# `python -m evals view --html view.html` makes a page of this, with a slider over blocks and
# steps, and two policies side by side.
#
# ## What a budget costs
#
# `kvjax.memory` counts bytes without allocating any. For Llama-3.1-8B in bfloat16, a full
# cache of 128k tokens takes as much memory as the weights. With a budget the size stops
# growing.

# %%
llama = dict(layers=32, kv_heads=8, head_dim=128)
lengths = 2 ** np.arange(10, 18)
full = [kvjax.memory(**llama, budget=int(length), block=0).total / 2**30 for length in lengths]

figure, axis = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
axis.plot(lengths, full, color="#555555", marker="o", markersize=4, label="full cache")
for budget, colour in zip((1024, 4096, 16384), ("#0072b2", "#d55e00", "#009e73"), strict=True):
    bounded = kvjax.memory(**llama, budget=budget, block=128).total / 2**30
    axis.plot(lengths, np.minimum(full, bounded), color=colour, label=f"budget {budget:,}")
axis.set(
    xscale="log",
    yscale="log",
    xlabel="tokens in the prompt",
    ylabel="GiB per sequence",
    title="Llama-3.1-8B's cache",
)
axis.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
axis.minorticks_off()
axis.grid(color="#eeeeee")
axis.spines[["top", "right"]].set_visible(False)
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# The predicted size is the real size:

# %%
config = model.config
counted = kvjax.memory(
    layers=config.num_layers,
    kv_heads=config.num_kv_heads,
    query_heads=config.num_heads,
    head_dim=config.head_dim,
    policy="snapkv(kernel=13)+caote",
    budget=96,
    block=64,
    dtype="float32",
)
taken = caches["snapkv(kernel=13)+caote, by block"].nbytes
print(f"counted {counted.total:,} bytes, taken {taken:,}")
assert counted.total == taken

# %% [markdown]
# ## A prompt as it streams in
#
# `models.stream` yields tokens as they come, and compiles once for prompts of any length.

# %%
for text in ("The river was calm. " * 20, "The old judge walked home. " * 60):
    tokens = tokenizer.encode(f"{text}The code of amber falcon is 4719. {question}")
    steps = models.stream(
        model,
        [tokens],
        policy="h2o+caote",
        budget=96,
        block=64,
        max_new_tokens=4,
    )
    said = tokenizer.decode([int(token[0]) for token, cache in steps])
    print(f"{len(tokens):5,} tokens in, {said!r} out")

# %% [markdown]
# Next: [write your own score in ten lines](2-your-own-score.ipynb).
