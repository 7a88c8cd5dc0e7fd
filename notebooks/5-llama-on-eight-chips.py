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
# # A Llama or Qwen folder, on one device or on eight
#
# The code that ran the small model runs Llama, Mistral, Qwen, Gemma, Phi and other families,
# from a folder in Hugging Face's layout, on a CPU, a GPU, or the eight chips of a TPU v5e-8.
# Only one argument differs, `mesh`. Set `MODEL` to your folder or hub model. Without one, a
# small random checkpoint of Llama's shape is written and read back, so that every cell runs
# anywhere.
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

extras = "hub,plot"  # and what this runtime needs: "cuda" on a GPU, "tpu" on a TPU
needed = ["kvjax", "flax", "jaxtyping", "tokenizers", "huggingface_hub", "matplotlib"]
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
import importlib.util
import os

# Such as "meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen3-8B", or a folder.
MODEL = os.environ.get("MODEL", "")

# Without an accelerator, a CPU is eight devices; this has to be said before JAX starts.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)

import jax

print(f"{jax.device_count()} device(s): {jax.devices()[0].device_kind}")

# %% [markdown]
# ## A folder
#
# A folder has `config.json`, safetensors in one file or in shards, and `tokenizer.json`.
# `models.save` writes the same layout, with transformers' names.

# %%
import tempfile
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

import kvjax
import models
from models.parameters import array_shapes, partition

if not MODEL:
    MODEL = str(Path(tempfile.mkdtemp()) / "small-llama")
    small = models.Config(
        512, 128, 256, num_layers=4, num_heads=16, num_kv_heads=8, max_positions=8192
    )
    models.save(MODEL, models.Decoder(small, rngs=nnx.Rngs(0)))
print(Path(MODEL).name, sorted(path.name for path in Path(MODEL).glob("*")))

# %% [markdown]
# ## Sharded while it loads
#
# A mesh has two axes: `data` splits the batch; `tensor` splits the heads, the feed-forward
# and the vocabulary. Each tensor is read directly onto the devices that own a part of it, so
# a model may be larger than the memory of one. With eight chips and eight KV heads, each chip
# has one head.

# %%
devices = jax.device_count()
mesh = models.parse_mesh(f"data=1,tensor={devices}")
model, tokenizer = models.load(
    MODEL, dtype="bfloat16" if jax.default_backend() != "cpu" else "float32", mesh=mesh
)
config = model.config
for name, array in (
    ("embedding", model.embedding),
    ("qkv", model.layers[0].qkv),
    ("down", model.layers[0].down),
):
    array = array[...]
    print(
        f"{name:10} {array.shape!s:22} on each device {array.addressable_shards[0].data.shape}"
    )

# %% [markdown]
# ## The same code
#
# The prompt is yours, or 600 random tokens. The tokens and the cache are those of one device,
# up to rounding. Nothing else in the call depends on the mesh.

# %%
if tokenizer is None:
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, (1, 600))
else:
    text = (
        "The code of amber falcon is 4719. "
        + "The river was calm. " * 120
        + "The code of amber falcon is"
    )
    prompt = np.array([tokenizer.encode(text)])
settings = dict(policy="snapkv+caote", budget=128, block=64, max_new_tokens=8, end=())
out = models.generate(model, prompt, **settings)
print(
    "generated:",
    out.tokens[0].tolist() if tokenizer is None else tokenizer.decode(out.tokens[0].tolist()),
)
key = out.cache.layers[0].key
print(
    f"cache {out.cache.nbytes:,} bytes in all; a layer's keys {key.shape}, on a device",
    end=" ",
)
print(key.addressable_shards[0].data.shape)

if devices > 1 and jax.default_backend() == "cpu":
    alone, _ = models.load(MODEL)
    one = models.generate(alone, prompt, **settings)
    assert one.tokens.tolist() == out.tokens.tolist()
    assert (jnp.sort(one.cache.position) == jnp.sort(out.cache.position)).all()
    print("one device: the same tokens, and the same tokens kept")

# %% [markdown]
# Eviction needs no communication: a head scores and frees its own slots. In a decode step the
# devices exchange only the model's own sums: one after attention and one after the
# feed-forward.
#
# ## Does Llama-3.1-8B fit on a v5e-8?
#
# A chip of a v5e has 16 GB. Eight chips hold the weights easily. The cache decides: it grows
# with the length of the prompts and with the batch. `kvjax.memory` counts it for sixteen
# sequences at once:

# %%
llama = models.Config(
    128_256,
    4096,
    14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    max_positions=131_072,
    tie_embeddings=False,
)
weights = 2 * sum(int(np.prod(shape)) for shape in array_shapes(llama).values())
sizes = dict(
    layers=llama.num_layers, kv_heads=llama.num_kv_heads, head_dim=llama.head_dim, batch=16
)
lengths = 2 ** np.arange(12, 18)
full = np.array(
    [kvjax.memory(**sizes, budget=int(length), block=0).total for length in lengths]
)
bounded = np.minimum(full, kvjax.memory(**sizes, budget=8192, block=512).total)

figure, axis = plt.subplots(figsize=(6.8, 3.6), layout="constrained")
place = np.arange(len(lengths))
for shift, cache, name, colour in (
    (-0.2, full, "full cache", "#999999"),
    (0.2, bounded, "budget 8,192", "#0072b2"),
):
    axis.bar(
        place + shift, cache / 8 / 1e9, 0.38, bottom=weights / 8 / 1e9, color=colour, label=name
    )
axis.bar(place, weights / 8 / 1e9, 0.78, color="#e69f00", label="weights, bfloat16")
axis.axhline(16, color="#d55e00", linestyle="--", linewidth=1)
axis.annotate(
    "a v5e chip's memory",
    (-0.45, 16),
    xytext=(0, 4),
    textcoords="offset points",
    color="#d55e00",
    fontsize=9,
)
axis.set_xticks(place, [f"{length // 1024}k" for length in lengths])
axis.set(xlabel="tokens in each of 16 prompts", ylabel="GB a chip")
axis.spines[["top", "right"]].set_visible(False)
axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 0.92))
plt.show()

# %% [markdown]
# ## The shapes, checked by a compiler
#
# If the package `libtpu` is installed, XLA can compile for a TPU that is not present, and its
# report says what each chip would hold. The weights are given by shape and sharding alone, so
# nothing is allocated. The whole of `generate` is compiled: 4,096 prompt tokens in blocks of
# 512, 16 new tokens, 1,024 slots per head.


# %%
def described(config, mesh):
    """A decoder whose arrays are shapes with a place on the mesh."""
    places = {name: NamedSharding(mesh, partition(name, mesh)) for name in array_shapes(config)}
    shapes = array_shapes(config).items()
    weights = {
        name: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=places[name])
        for name, shape in shapes
    }
    return models.Decoder(config, weights)


def run(model):
    prompt = np.zeros((1, 4096), np.int32)
    return models.generate(
        model, prompt, policy="snapkv+caote", budget=1024, block=512, max_new_tokens=16
    )


if jax.default_backend() != "cpu":
    target, chips = f"the {jax.devices()[0].device_kind} at hand", jax.devices()
elif importlib.util.find_spec("libtpu") is not None:
    from jax.experimental import topologies

    alone = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    }
    os.environ.update(alone)  # nobody to ask what machine this is
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    target = f"{len(chips)} chips of a {chips[0].device_kind}, none of them here"
else:
    print(
        "libtpu is not installed (pip install libtpu), so no TPU program is made: "
        "these are eight devices of a CPU."
    )
    target, chips = "eight devices of a CPU", jax.devices()

chips = np.array(chips)[: 8 if len(chips) >= 8 else 1]
compiled = (
    jax.jit(run)
    .lower(described(llama, Mesh(chips.reshape(1, -1), ("data", "tensor"))))
    .compile()
)
memory = compiled.memory_analysis()
print(f"Llama-3.1-8B compiled for {target}. Each holds")
for name, size in (
    ("weights", memory.argument_size_in_bytes),
    ("cache and answer", memory.output_size_in_bytes),
    ("all else", memory.temp_size_in_bytes),
):
    print(f"  {name:17} {size / 2**20:8,.0f} MiB")
cache = kvjax.memory(layers=32, kv_heads=8, head_dim=128, budget=1024, block=512)
print(f"kvjax.memory counts {cache.total / len(chips) / 2**20:,.0f} MiB of cache a device")

# %% [markdown]
# Each chip holds an eighth of the weights, and the cache has the size that was counted: the
# compiler has split both as intended. These are sizes, not timings.
#
# ## On several hosts
#
# Call `jax.distributed.initialize()` first, in every process. `jax.devices()` then lists the
# devices of all hosts, and the mesh spans them. The rest stays the same: [Run on several
# hosts](../docs/how-to/several-hosts.md).
