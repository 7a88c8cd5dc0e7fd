"""Folders of models and predictors that are missing, damaged, half written or lie: refused in one sentence, unread."""

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from tests.bad_input.campaign import refused, state_of

pytestmark = pytest.mark.bad_input

GOLDEN = Path(__file__).parents[1] / "models" / "golden"
Change = Callable[[Path], Any]
GONE = object()
SLIDING = {"use_sliding_window": True, "sliding_window": 4}
KEY = "model.layers.1.self_attn.k_proj.weight"


def write(name: str, content: bytes | str) -> Change:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def drop(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def cut(name: str, share: float) -> Change:
    def change(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(share * len(data))])

    return change


def config(**fields: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        raw = json.loads(file.read_text()) | fields
        file.write_text(json.dumps({name: value for name, value in raw.items() if value is not GONE}))

    return change


def tensors(function: Callable[[dict[str, np.ndarray]], Any]) -> Change:
    def change(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        function(held)
        save_file(held, folder / "model.safetensors")

    return change


def put(held: dict[str, np.ndarray], value: float) -> None:
    held["model.layers.1.mlp.down_proj.weight"][-1, -1] = value


def index(content: Any) -> Change:
    return write("model.safetensors.index.json", json.dumps(content))


def header(length: int, content: bytes = b"") -> Change:
    return write("model.safetensors", length.to_bytes(8, "little") + content)


def a_folder_in_its_place(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def a_link_to_nothing(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(folder / "nowhere")

    return change


def renamed(before: str, after: str) -> Change:
    return lambda folder: (folder / before).rename(folder / after)


MODELS: dict[str, Change] = {
    **{
        f"{name} {value!r:.60}": config(**{name: value})
        for name, value in [
            ("architectures", None), ("architectures", 7), ("architectures", "LlamaForCausalLM"),
            ("architectures", [7]), ("architectures", [["LlamaForCausalLM"]]), ("vocab_size", 10**12),
            ("num_hidden_layers", 10**7), ("eos_token_id", [1, 2**31]), ("rms_norm_eps", 10**400),
            ("num_key_value_heads", "2"), ("head_dim", 5), ("head_dim", "8"), ("max_position_embeddings", "long"),
            ("rms_norm_eps", None), ("rms_norm_eps", "small"), ("rms_norm_eps", -1.0), ("rms_norm_eps", float("nan")),
            ("rms_norm_eps", [1e-6]), ("rope_scaling", [1]), ("rope_scaling", {"rope_type": "longrope", "factor": 2}),
            ("rope_scaling", {"rope_type": "linear", "factor": "two"}),
            ("rope_scaling", {"rope_type": "llama3", "factor": 8, "low_freq_factor": [1]}),
            ("rope_scaling", {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": "long"}),
            ("rope_scaling", {"rope_type": "linear", "factor": -2}), ("eos_token_id", "</s>"),
            ("eos_token_id", ["</s>"]), ("eos_token_id", 1.5), ("eos_token_id", {"id": 1}), ("bos_token_id", "<s>"),
            ("pad_token_id", [0]),
        ]
    },
    "config gone": drop("config.json"),
    "config empty": write("config.json", ""),
    "config garbage": write("config.json", b"\x00\xff\xfe garbage"),
    "config cut short": cut("config.json", 0.5),
    "config a list": write("config.json", "[]"),
    "config without end": write("config.json", "[" * 100_000),
    "config of another encoding": write("config.json", '{"a": "é"}'.encode("utf-16")),
    "config a folder": a_folder_in_its_place("config.json"),
    "config a link to nothing": a_link_to_nothing("config.json"),
    "config empty object": write("config.json", "{}"),
    "architectures unknown": config(architectures=["GPT2LMHeadModel"]),
    **{
        f"{name} {value!r}": config(**{name: value})
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        for value in (None, "8", 0, -1, 2.5, [8], True)
        if (name, value) != ("num_hidden_layers", True)
    },
    **{
        f"{name} beyond all": config(**{name: 10**30})
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
            "num_key_value_heads", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
        )
    },
    "generation_config eos beyond all": write("generation_config.json", '{"eos_token_id": 1000000000000}'),
    **{
        f"rope_theta {value!r:.9}": config(rope_theta=value, rope_parameters=GONE)
        for value in ("base", [1e4], 10**400)
    },
    "a number of 5,000 digits": write("config.json", '{"vocab_size": 1' + "0" * 5000 + "}"),
    "intermediate_size gone": config(intermediate_size=GONE),
    **{
        f"{family}: {fields!r:.60}": config(architectures=[f"{family}ForCausalLM"], **fields)
        for family, fields in [
            ("Mistral", {"sliding_window": 0}), ("Mistral", {"sliding_window": "all"}),
            ("Mistral", {"sliding_window": 10**30}), ("Qwen3", {"layer_types": ["full_attention"]} | SLIDING),
            ("Qwen3", {"layer_types": 3} | SLIDING), ("Qwen2", {"max_window_layers": "all"} | SLIDING),
        ]
    },
    "generation_config garbage": write("generation_config.json", "{"),
    "generation_config eos text": write("generation_config.json", '{"eos_token_id": "</s>"}'),
    "weights gone": drop("model.safetensors"),
    "weights empty": write("model.safetensors", b""),
    "weights garbage": write("model.safetensors", b"garbage" * 100),
    "weights cut in the header": cut("model.safetensors", 0.005),
    "weights cut in half": cut("model.safetensors", 0.5),
    "weights cut by a byte": cut("model.safetensors", 0.99999),
    "weights a folder": a_folder_in_its_place("model.safetensors"),
    "weights a link to nothing": a_link_to_nothing("model.safetensors"),
    "weights with a header beyond all": header(2**63),
    "weights with an empty header": header(0),
    "weights with a header of garbage": header(8, b"{{{{{{{{"),
    "weights with a header that is a list": header(2, b"[]"),
    "weights without tensors": header(2, b"{}"),
    "weights of Git LFS": write("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    "weights pickled": renamed("model.safetensors", "pytorch_model.bin"),
    "weights pickled by Meta": renamed("model.safetensors", "consolidated.00.pth"),
    "weights under another name": renamed("model.safetensors", "weights.safetensors"),
    "a tensor gone": tensors(lambda held: held.pop("model.norm.weight")),
    "a tensor too many": tensors(lambda held: held.update(extra=np.zeros(3, np.float32))),
    "a tensor of another shape": tensors(lambda held: held.update({"model.norm.weight": np.zeros(3, np.float32)})),
    "a tensor transposed": tensors(lambda held: held.update({KEY: np.ascontiguousarray(held[KEY].T)})),
    "a tensor of a layer too many": config(num_hidden_layers=1),
    "the output matrix gone": tensors(lambda held: held.pop("lm_head.weight")),
    "a tensor of integers": tensors(
        lambda held: held.update({"model.norm.weight": held["model.norm.weight"].astype(np.int8)})
    ),
    **{
        f"a tensor with {value}": tensors(functools.partial(put, value=value))
        for value in (float("nan"), float("inf"), float("-inf"))
    },
    "a tensor flat": tensors(
        lambda held: held.update({"model.embed_tokens.weight": held["model.embed_tokens.weight"].ravel()})
    ),
    "index garbage": write("model.safetensors.index.json", "{"),
    "index without map": index({}),
    "index of a missing shard": index({"weight_map": {"a": "model-00001-of-00002.safetensors"}}),
    "index of a shard with a long name": index({"weight_map": {"a": "x" * 5000}}),
    "index of a shard with a zero byte": index({"weight_map": {"a": "x\0y"}}),
    "index out of the folder": index({"weight_map": {"a": "../model.safetensors"}}),
    "index of a tensor that is not there": index({"weight_map": {"a": "model.safetensors"}}),
    "index of nothing": index({"weight_map": {}}),
    "index of the folder itself": index({"weight_map": {"a": "."}}),
    "tokenizer empty": write("tokenizer.json", ""),
    "tokenizer garbage": write("tokenizer.json", b"\x80\x04garbage"),
    "tokenizer of no kind": write("tokenizer.json", '{"version": "1.0", "model": {"type": "Magic"}}'),
    "tokenizer cut short": cut("tokenizer.json", 0.5),
    "tokenizer_config garbage": write("tokenizer_config.json", "{'a': 1}"),
    "special token a number": write("tokenizer_config.json", '{"bos_token": 1}'),
    "special token an empty object": write("tokenizer_config.json", '{"bos_token": {"id": 1}}'),
    "special tokens map garbage": write("special_tokens_map.json", "]"),
    "chat template of numbers": write("tokenizer_config.json", '{"chat_template": [1]}'),
    "chat template no text": write("chat_template.jinja", b"\xff\xfe\x00"),
}  # fmt: skip


# What is said of these; of single entries of a config, see tests/models/test_config.py.
SAID: dict[str, str] = {
    "config gone": "has no config.json",
    "config garbage": "config.json is not valid JSON",
    "config cut short": "config.json is not valid JSON",
    "config a list": "config.json holds a JSON list, not an object",
    "architectures unknown": "GPT2LMHeadModel is not supported; supported are LlamaForCausalLM, Mistral.*Qwen3",
    "weights gone": "neither model.safetensors nor model.safetensors.index.json",
    **{
        f"weights {how}": "model.safetensors is truncated or corrupted"
        for how in ("empty", "garbage", "cut in half", "cut by a byte", "with a header beyond all")
    },
    "weights with a header of garbage": "model.safetensors is truncated or corrupted",
    "weights of Git LFS": "is a Git LFS pointer, not the weights; fetch them with git lfs pull",
    "weights pickled": "pytorch_model.bin holds pickled weights.*convert them to safetensors",
    "weights pickled by Meta": "consolidated.00.pth holds pickled weights.*convert them to safetensors",
    "a tensor gone": "lacks the tensor model.norm.weight",
    "a tensor of another shape": r"model.norm.weight has shape \(3,\); its config.json requires \(32,\)",
    "a tensor transposed": rf"{KEY} has shape \(32, 16\); its config.json requires \(16, 32\)",
    "a tensor of a layer too many": "holds the tensor model.layers.1.input_layernorm.weight, which the model",
    "the output matrix gone": "lacks the tensor lm_head.weight",
    "a tensor of integers": "model.norm.weight is stored as I8; supported are F64, F32, F16, BF16",
    "index without map": "has no weight_map",
    "index of a missing shard": "lacks the shard model-00001-of-00002.safetensors",
    "index out of the folder": "not a file of its own folder",
    "index of a tensor that is not there": "puts the tensor a in model.safetensors, which lacks it",
    **{
        f"tokenizer {how}": "tokenizer.json is corrupted or of an unknown kind"
        for how in ("empty", "garbage", "of no kind", "cut short")
    },
    "tokenizer_config garbage": "tokenizer_config.json is not valid JSON",
    **dict.fromkeys(
        ("special token a number", "special token an empty object", "chat template of numbers"),
        "the special tokens or the chat template beside .* are not in Hugging Face",
    ),
}  # fmt: skip
MISSING = ("config gone", "weights gone", "index of a missing shard")  # these are FileNotFoundErrors


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "whole"
    shutil.copytree(GOLDEN / "llama3", folder, ignore=shutil.ignore_patterns("golden.npz"))
    shutil.copy(GOLDEN / "tokenizer" / "tokenizer.json", folder)
    assert models.load(folder)[1] is not None  # whole, it loads
    return folder


def damaged(whole: Path, to: Path, change: Change) -> Path:
    shutil.copytree(whole, to)
    change(to)
    return to


@pytest.mark.parametrize("name", MODELS)
def test_a_damaged_model_is_refused(whole, tmp_path, name):
    folder = damaged(whole, tmp_path / "model", MODELS[name])
    before = state_of(folder)
    error = refused(functools.partial(models.load, folder))
    assert state_of(folder) == before
    if name in SAID:
        assert re.search(SAID[name], str(error)) and isinstance(error, FileNotFoundError) == (name in MISSING), error
        assert error.__suppress_context__ or error.__context__ is None


TEMPLATES = {
    "a template that breaks off": "{% for m in messages %}",
    "an unknown filter": "{{ messages | no_such_filter }}",
    "an unknown name called": "{{ no_such_thing() }}",
    "a refusal of the template": "{{ raise_exception('no system role') }}",
    "code that leaves the sandbox": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "code that writes": "{{ messages.append(1) }}",
    "a range without end": "{% for i in range(10 ** 12) %}x{% endfor %}",
    "a key that is not there": "{{ messages[0]['absent']['deeper'] }}",
    "itself again and again": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a number too large": "{{ 9 ** (9 ** 9) }}",
    "a text too long": "{{ 'a' * 10 ** 12 }}",
    "a loop in a loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_chat_template_that_fails_is_refused(template):
    import tokenizers

    tokenizer = models.Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), None, template)
    refused(lambda: tokenizer.chat([{"role": "user", "content": "Hello"}]))


PREDICTORS: dict[str, Change] = {
    "gone": lambda folder: [file.unlink() for file in folder.iterdir()],
    "weights gone": drop("butler.safetensors"),
    "weights empty": write("butler.safetensors", b""),
    "weights garbage": write("butler.safetensors", b"\x80\x04garbage" * 50),
    "weights cut in half": cut("butler.safetensors", 0.5),
    "weights of nothing": lambda folder: save_file({}, folder / "butler.safetensors"),
    "description empty": write("butler.json", ""),
    "description garbage": write("butler.json", b"\xff\xfe"),
    "description of numbers": write("butler.json", '{"butler": 1, "model": 2}'),
    "description with another field": write("butler.json", '{"butler": {"colour": 1}, "model": {}}'),
    "description cut short": cut("butler.json", 0.7),
}


@pytest.mark.parametrize("change", PREDICTORS.values(), ids=PREDICTORS)
def test_a_damaged_predictor_is_refused(tmp_path, change):
    own = Path(models.__file__).parent / "retriever"
    folder = damaged(own / "butler", tmp_path / "butler", change)
    before = state_of(folder)
    model = _retriever()
    refused(functools.partial(models.load_network, folder, model))
    assert state_of(folder) == before


@functools.cache
def _retriever() -> models.Decoder:
    return models.load("retriever")[0]
