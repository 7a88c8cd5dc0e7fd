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
# # Train a butler, watch its curves, decode with it
#
# Eviction is final: a token that was evicted cannot be read again.
# [TokenButler](https://arxiv.org/abs/2503.07518v1) (v1; v2 is another method) evicts nothing. A
# small network reads the output of the first layer and predicts, for every later layer and
# head, how much each token will matter to the current one. Each decode step then reads only
# the best part. In this notebook we train one for the embedded model in a minute, on far less
# text than it needs. We compare its predictions with other ways to choose, and decode with it.
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

extras = "train,plot"  # and what this runtime needs: "cuda" on a GPU, "tpu" on a TPU
needed = [
    "kvjax",
    "flax",
    "jaxtyping",
    "tokenizers",
    "optax",
    "orbax",
    "tensorboardX",
    "matplotlib",
]
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
# ## What is trained
#
# The model is frozen. For each layer from 1 on and each head the predictor gives a query and
# a key of 32 numbers, computed by one small attention over layer 0's output. Their product
# should be the model's own attention logit. The loss is the mean squared difference over all
# pairs that a query sees. It is computed by Gram matrices, so its cost grows with the length,
# not with its square.

# %%
import json
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import models
from train import butler as training
from train.text import open_corpus

model, tokenizer = models.load("retriever")
settings = training.settings_of(
    model.config, embedded=True, tokens=100_000, seq_len=256, batch=8
)
shape = training.butler_config_of(model.config, embedded=True)
corpus = open_corpus(["python"], tokenizer, settings.seq_len, eval_rows=8)
print(
    f"{shape.num_parameters:,} parameters; "
    f"{settings.steps} steps of {settings.batch} x {settings.seq_len} tokens"
)
print(f"text: {corpus.name}; held out: {corpus.held_out.size:,} tokens")

# %% [markdown]
# "python" is the help that ships with Python, and sentences of ours, so nothing is
# downloaded. `open_corpus` also takes files, folders or a data set on the hub. The same on
# the command line is `python -m train.butler --out butler/`. A killed run resumes where it
# stopped, bit for bit.

# %%
folder = Path(tempfile.mkdtemp())
trained, summary = training.train(
    folder,
    model,
    shape,
    corpus,
    settings,
    options=training.loop.Options(name="retriever", eval_every=8, log_every=2, save_every=1000),
)
print(
    "\n".join(
        sorted(
            path.name
            for path in folder.iterdir()
            if path.is_file() and "events" not in path.name
        )
    )
)

# %% [markdown]
# ## The curves
#
# `log.jsonl` has a line for every few steps; TensorBoard's events are beside it. The oracle
# knows the model's true attention. The *hit rate* is the share of the oracle's tokens that
# the predictor also chooses, if both may read half of what a query sees.

# %%
lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def curve(name):
    return np.transpose([(line["step"], line[name]) for line in lines if name in line])


figures = summary["figures"]

figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
axes[0].plot(*curve("loss"), color="#0072b2", label="training text")
axes[0].plot(
    *curve("held_out/loss"), color="#d55e00", marker="o", markersize=4, label="held-out text"
)
axes[0].set(yscale="log", title="loss")
axes[0].legend(frameon=False)
axes[1].plot(
    *curve("held_out/hit_rate"), color="#d55e00", marker="o", markersize=4, label="this run"
)
for name, style in (("streaming", "--"), ("random", ":")):
    axes[1].axhline(
        figures[name]["hit_rate"], color="#777777", linestyle=style, linewidth=1, label=name
    )
axes[1].set(title="hit rate at 50%, held-out text")
axes[1].legend(frameon=False)
axes[2].plot(*curve("learning_rate"), color="#777777")
axes[2].set(title="learning rate")
for axis in axes:
    axis.set_xlabel("step")
    axis.title.set_fontsize(10)
    axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## Against other ways to choose
#
# The same measure for sources that need no training: pages of keys with bounds (`quest`), the
# attention of another layer, the newest tokens. The last source is the predictor in the
# package, which was trained for far longer.

# %%
shipped = models.own_network("retriever", model, "butler")
found = {
    "shipped": training.measure(model, shipped, corpus.held_out, "butler", 0.5)[
        "hit_rate"
    ].mean()
}
found |= {
    {"butler": "this run"}.get(name, name): values["hit_rate"]
    for name, values in figures.items()
}
found = dict(sorted(found.items(), key=lambda item: item[1]))

figure, axis = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
colours = [{"this run": "#d55e00", "shipped": "#0072b2"}.get(name, "#bbbbbb") for name in found]
axis.barh([name.replace("_", " ") for name in found], list(found.values()), color=colours)
for place, value in enumerate(found.values()):
    axis.annotate(
        f"{value:.2f}",
        (value, place),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
    )
axis.axvline(0.5, color="#777777", linewidth=1, linestyle=":")
axis.set(xlim=(0, 1.08), title="share of the oracle's tokens that is chosen too")
axis.title.set_fontsize(10)
axis.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## Decode with it
#
# `select="butler"` takes the place of a policy. All tokens stay in the cache, and each head
# reads a share of them in each step, and the first four as well. We begin with text:

# %%
prompt = "The function returns a list of all the names that are"
settings = {
    "all tokens": {},
    "this run, half": dict(select="butler", networks=trained, budget=0.5),
}
for name, chosen in settings.items():
    out = models.generate(
        model, [tokenizer.encode(prompt)], max_new_tokens=16, end=(), **chosen
    )
    print(f"{name:15}{tokenizer.decode(out.tokens[0].tolist())!r}")

# %% [markdown]
# Now questions about facts, which the training text does not contain: twenty prompts of 384
# tokens, answered by reading shares of them.

# %%
from evals import tasks

samples = [
    tasks.needle(seed, tokenizer, 384, depth)
    for depth in (0.1, 0.3, 0.5, 0.7, 0.9)
    for seed in range(4)
]
lengths = np.array([len(sample.tokens) for sample in samples])
tokens = np.zeros((len(samples), lengths.max()), np.int32)
for row, sample in enumerate(samples):
    tokens[row, : lengths[row]] = sample.tokens


def answered(**chosen):
    out = models.generate(model, tokens, lengths=lengths, max_new_tokens=4, end=(), **chosen)
    right = [
        row[: len(s.answer_tokens)].tolist() == s.answer_tokens
        for row, s in zip(out.tokens, samples, strict=True)
    ]
    return sum(right) / len(right)


shares = (0.5, 0.25)
table = {
    "oracle": dict(select="oracle"),
    "quest, pages of 4": dict(select="quest(page_size=4)"),
    "shipped butler": dict(select="butler", networks=shipped),
    "this run's butler": dict(select="butler", networks=trained),
    "random": dict(select="random"),
}
print(f"{'all tokens':20}{answered():7.2f}")
print(f"{'share read':20}" + "".join(f"{share:7.1%}" for share in shares))
for name, chosen in table.items():
    print(
        f"{name:20}" + "".join(f"{answered(**chosen, budget=share):7.2f}" for share in shares)
    )

# %% [markdown]
# The first token of an answer comes from the prompt, which is dense. The other digits must be
# found by reading a part. The butler in the package finds them. Ours predicts prose better
# than the sources without training, but it fails at look-ups: it has seen too little text,
# and library text contains none. The training text decides what a predictor can do:
# [TokenButler on the embedded model](../docs/results/TOKENBUTLER.md) has the figures, and
# says where the one in the package falls short.
#
# ## On a real language model
#
# `python -m models.get smollm2` fetches SmolLM2-135M-Instruct (93 MB). The package has a
# predictor of it as well: 1% of its size, trained on 3 million tokens of the King James Bible
# and of Python's documentation. Where the model is there, the next cell takes sentences of
# ours, and then lets the model write on while each head reads a part.

# %%
try:
    real, words = models.load("smollm2", dtype="float32")
except FileNotFoundError as missing:
    real = None
    print(missing)
if real is not None:
    butler = models.own_network("smollm2", real, "butler")
    rows = open_corpus(["python"], words, 256, eval_rows=2).held_out
    for name in ("butler", "quest", "streaming", "random"):
        found = training.measure(real, butler, rows, name, 0.5)["hit_rate"].mean()
        print(f"{name:10}{found:6.2f} of the oracle's tokens")
    prompt = words.encode(
        "In the beginning God created the heaven and the earth. And the earth was without form,"
    )
    chosen = {
        "all tokens": {},
        "butler, half": dict(select="butler", networks=butler, budget=0.5),
    }
    chosen["random, half"] = dict(select="random", budget=0.5)
    for name, how in chosen.items():
        out = models.generate(real, [prompt], max_new_tokens=20, **how)
        print(f"{name:14}{words.decode(out.tokens[0].tolist())!r}")

# %% [markdown]
# A short text shows little; [TokenButler](../docs/results/TOKENBUTLER.md) has perplexity and
# co-reference. To train a predictor like it, and to use it (`train.butler` takes an hour and
# a half on two CPU cores; a killed run resumes):
#
#     apt-get download bible-kjv-text python3.13-doc
#     for package in *.deb; do dpkg-deb -x "$package" debian; done
#     python -m papers texts debian king-james-bible python-doc
#     python -m train.butler --model smollm2 --data king-james-bible python-doc \
#         --seq-len 1024 --tokens 3e6 --out butler/
#     python -m models.generate smollm2 --select butler --networks butler/ --budget 0.5 \
#         --prompt "In the beginning"
#
# For a large model: `python -m train.butler --model path/to/Llama-3.2-1B --data
# allenai/c4:realnewslike --mesh data=8 --out butler/`.
#
# Next: [a Llama or Qwen folder, sharded](5-llama-on-eight-chips.ipynb).
