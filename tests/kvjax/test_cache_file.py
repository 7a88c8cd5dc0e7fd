"""A cache comes out of its file as it went in, bit for bit, or not at all."""

import dataclasses
import functools
import json
import os
import tempfile
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save as to_safetensors

import kvjax
from kvjax import KVCache, PagedCache
from kvjax._src import cache_file
from tests.bad_input.campaign import calls
from tests.kvjax.blocks import empty
from tests.kvjax.test_new_caches import B, D, K, block, filled, step
from tests.tiers import first

PLAIN, PAGED = "h2o+protect(recent=2)", "h2o+protect(recent=2)@layer"  # the last token is there
KINDS = [  # a policy, layers, dtype
    (PAGED, None, "float32"),
    ("h2o+caote+positions", 2, ("float8_e4m3fn", "int8")),
    ("expected_attention(sinks=1)", 2, "float16"),
    ("full", None, "float32"),
    ("butler(dim=4)", 2, "bfloat16"),
    ("snapkv(window=4)@adakv", 2, "float32"),
]


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "cache.safetensors"


def save(path: Path, policy: str = PAGED, **options):
    """A small cache in a file."""
    cache = filled(policy)
    kvjax.save_cache(path, cache, policy=policy, **options)
    return cache


def assert_same(a, b) -> None:
    """The same structure, dtypes and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (one.shape, one.dtype, one.weak_type) == (other.shape, other.dtype, other.weak_type)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def refused(function, *arguments, **options) -> str:
    with pytest.raises(ValueError) as error:
        function(*arguments, **options)
    message = str(error.value)
    assert "\n" not in message and message.endswith(".")
    return message


tiny = functools.partial(empty, kv_heads=1, query_heads=2, head_dim=D, budget=3)  # room for three tokens


@pytest.mark.parametrize(("policy", "layers", "dtype"), first(2, KINDS))
def test_a_cache_comes_back_bit_for_bit_and_goes_on_as_the_saved_one_would_have(policy, layers, dtype, path):
    cache = filled(policy, layers, dtype=dtype)
    kvjax.save_cache(path, cache, policy=policy)
    loaded = kvjax.load_cache(path)
    assert_same(loaded, cache)
    assert_same(kvjax.load_cache(path, policy=policy), cache)
    for seed in range(5, 7):
        (out, cache), (again, loaded) = (step(policy)(one, *block(seed, layers)) for one in (cache, loaded))
        assert_same((out, cache), (again, loaded))


@pytest.mark.parametrize(("dtype", "said"), [("int8", "int8"), (("int8", "bfloat16"), "int8/bfloat16")])
def test_a_file_names_one_dtype_where_keys_and_values_are_alike(dtype, said, path):
    """As all files did before keys and values could differ."""
    kvjax.save_cache(path, tiny(None, dtype=dtype))
    assert kvjax.cache_info(path)["dtype"] == said
    info, arrays = of(path)
    write(path, info | {"dtype": "int8/int8/int8"}, arrays)
    why = "has keys or values that no cache has: dtype is 'int8/int8/int8'; expected one dtype, or keys'"
    assert why in refused(kvjax.load_cache, path)


def test_info_says_what_a_file_holds(path):
    cache = save(path, budget=6, model="a small one")
    assert kvjax.cache_info(path) == {
        "format": 1, "kvjax": kvjax.__version__, "kind": "paged", "page_size": 2, "positions": "absolute",
        "dtype": "float32", "query_heads": 2, "tokens": [12, 12], "policy": PAGED, "budget": 6,
        "model": "a small one", "pending": [], "seen": [], "cache_bytes": cache.nbytes,
        "full_cache_bytes": B * (12 * K * (2 * D * 4 + 4) + 4),
    }  # fmt: skip


def test_tokens_that_come_next_are_kept_with_the_cache_of_one_row(path):
    made = tiny("tova")
    kvjax.save_cache(path, made, pending=(3, 0), seen=[2, 5])
    assert [kvjax.cache_info(path)[name] for name in ("pending", "seen")] == [[3, 0], [2, 5]]
    assert_same(kvjax.load_cache(path), made)
    for cache, pending in ((made, [3, -1]), (filled("full"), [3])):
        with pytest.raises(ValueError, match=r"pending is \[3.*; expected the tokens of a cache of one row"):
            kvjax.save_cache(path, cache, pending=pending)


def test_a_policy_that_is_for_one_number_of_query_heads_is_saved(path):
    centres = path.with_name("centres.npy")
    np.save(centres, np.ones((1, 1, 2, 3 * D // 2)))
    policy = kvjax.triattention(file=str(centres))
    made = tiny(policy)
    kvjax.save_cache(path, made, policy=policy)
    assert_same(kvjax.load_cache(path, policy=policy), made)


def test_a_policy_of_ones_own_is_handed_over(path):
    own = kvjax.base_score("own", lambda o: o.columns.sum, statistics=("sum",))
    chained = kvjax.chain(own, kvjax.caote())
    cache = tiny(chained)
    kvjax.save_cache(path, cache, policy=chained)
    assert_same(kvjax.load_cache(path, policy=chained), cache)
    assert refused(kvjax.load_cache, path) == (
        f"{path} names the policy 'own+caote', which cannot be read; give it as policy=."
    )


def test_what_is_given_and_the_same_is_taken(path):
    cache = save(path, budget=0.25, model="a")
    loaded = kvjax.load_cache(
        path, policy=kvjax.parse("h2o + protect(recent=2) @ layer"), budget=np.float64(0.25), model="a"
    )
    assert_same(loaded, cache)


def test_a_good_file_stays_where_another_cannot_be_saved(path):
    """More that cannot be: tests/bad_input/calls.txt."""
    save(path)
    before = path.read_bytes()
    assert "state is not that of 'tova'" in refused(kvjax.save_cache, path, filled(PAGED), policy="tova")
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def test_a_cache_that_was_donated_or_is_traced_is_refused(path):
    cache = tiny("tova")
    with pytest.raises(ValueError, match=r"the cache is traced \(by jax\.jit, vmap or grad\)"):
        jax.jit(lambda cache: kvjax.save_cache(path, cache, policy="tova"))(cache)
    jax.jit(lambda cache: cache, donate_argnums=0)(cache)
    if cache.key.is_deleted():
        assert "was donated to a compiled function" in refused(kvjax.save_cache, path, cache, policy="tova")
    assert not path.exists()


def test_a_dtype_that_no_file_holds_is_refused(path):
    cache = tiny(None)
    cache = dataclasses.replace(
        cache, entries=cache.entries | {"key": jax.device_put(np.zeros(cache.key.shape, "float8_e5m2"))}
    )
    assert "key is of float8_e5m2, which a file does not hold" in refused(kvjax.save_cache, path, cache)


def test_a_good_file_survives_a_disk_that_is_full(path, monkeypatch):
    cache = save(path)

    def full(self, content):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        save(path, "full")
    assert os.listdir(path.parent) == [path.name]
    assert_same(kvjax.load_cache(path), cache)


def test_places_that_cannot_be_written_or_read_are_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"^cannot write .*: the folder .*none does not exist; make it first\.$"
    ):
        save(tmp_path / "none" / "cache")
    assert "it is a folder; name a file" in refused(save, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"^there is no file .*; name one that kvjax\.save_cache wrote\.$"):
        kvjax.load_cache(tmp_path / "none")
    assert refused(kvjax.load_cache, tmp_path) == f"{tmp_path} is no file; name one that kvjax.save_cache wrote."


def of(path: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """What a file says, and its arrays."""
    with safe_open(path, framework="np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return json.loads(file.metadata()[cache_file.ENTRY]), arrays


def write(path: Path, info, arrays: dict[str, np.ndarray], *, whole: bool = True) -> None:
    """A file whose sum is right, so that what else is wrong with it shows."""
    if whole:
        info = {name: value for name, value in info.items() if name != "sha256"}
        info = info | {"sha256": cache_file._digest(info, arrays)}
    text = info if isinstance(info, str) else json.dumps(info)
    path.write_bytes(to_safetensors(arrays, metadata={cache_file.ENTRY: text}))


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"Once upon a time there was a cache."])
def test_what_is_no_safetensors_file_is_refused(path, content):
    path.write_bytes(content)
    for read in (kvjax.load_cache, kvjax.cache_info):
        assert "is no safetensors file, or was cut short" in refused(read, path)


def test_other_peoples_safetensors_are_refused(path):
    for metadata in (None, {"format": "pt"}):
        path.write_bytes(to_safetensors({"key": np.zeros(2)}, metadata=metadata))
        assert "is a safetensors file, but holds no cache" in refused(kvjax.load_cache, path)


def test_a_file_of_a_later_format_is_refused(path):
    save(path)
    info, arrays = of(path)
    write(path, info | {"format": 3, "kvjax": "9.0", "news": 1}, arrays)
    assert f"has format 3, of a later kvjax than this {kvjax.__version__}" in refused(kvjax.load_cache, path)


@pytest.mark.parametrize(
    "change",
    [
        lambda info: "{",
        lambda info: "[" * 100_000,
        lambda info: info | {"more": 1},
        lambda info: {name: value for name, value in info.items() if name != "model"},
        lambda info: info | {"kind": "round"},
        lambda info: info | {"budget": "6"},
        lambda info: info | {"tokens": [0.5]},
        lambda info: info | {"query_heads": 0},
        lambda info: info | {"pending": ["3"]},
    ],
)
def test_what_a_file_says_must_be_readable(path, change):
    save(path)
    info, arrays = of(path)
    changed = change(info)
    write(path, changed, arrays, whole=isinstance(changed, dict))
    assert "is damaged: its metadata cannot be read" in refused(kvjax.load_cache, path)


def test_other_shapes_of_the_same_bytes_are_damage(path):
    """One head of four slots, read as two heads of two: a cache that could be, and holds other tokens."""
    kvjax.save_cache(path, tiny(None, budget=4))
    info, arrays = of(path)
    halves = {
        name: array if name == "next_position" else array.reshape(1, 2, -1, *array.shape[3:])
        for name, array in arrays.items()
    }
    assert halves["position"].shape == (1, 2, 2)
    write(path, info, halves, whole=False)
    assert "is damaged: its contents are not those that were written" in refused(kvjax.load_cache, path)


def in_format_1(path: Path) -> None:
    """Write a file of layers as it was when an array was that of all of them."""
    info, arrays = of(path)
    layers = range(sum(name.endswith("].position") for name in arrays))
    whole = {name.removeprefix("layers[0]."): array for name, array in arrays.items() if name.startswith("layers[0].")}
    whole = {name: np.stack([arrays[f"layers[{layer}].{name}"] for layer in layers]) for name in whole}
    write(path, info | {"format": 1}, whole | {"next_position": arrays["next_position"]})


@pytest.mark.parametrize(
    ("policy", "dtype"), [("h2o+caote", ("float8_e4m3fn", "int8")), ("butler(dim=4)", "bfloat16"), ("full", "float32")]
)
def test_a_file_of_stacked_layers_is_read_as_the_layers_that_it_held(policy, dtype, path):
    cache = filled(policy, 2, dtype=dtype)
    kvjax.save_cache(path, cache, policy=policy, model="a")
    before = kvjax.cache_info(path)
    in_format_1(path)
    assert_same(kvjax.load_cache(path, policy=policy, model="a"), cache)
    assert kvjax.cache_info(path) == before | {"format": 1}


@pytest.mark.parametrize("policy", ["h2o+pool", "h2o+pool@adakv"])
def test_a_file_without_ranks_is_read_as_of_tokens_that_have_none_yet(policy, path):
    cache = tiny(policy, layers=2)
    kvjax.save_cache(path, cache, policy=policy)
    info, arrays = of(path)
    before = {name.replace("state.others", "state"): array for name, array in arrays.items() if "rank" not in name}
    assert len(before) < len(arrays) and not before.keys() <= arrays.keys()
    write(path, info, before)
    assert_same(kvjax.load_cache(path), cache)


def test_layers_of_a_file_have_slots_of_their_own_and_each_its_arrays(path):
    cache = tiny("h2o", layers=3, windows=(2, None, 1))
    assert cache.layer_slots == (3, 4, 2)
    kvjax.save_cache(path, cache, policy="h2o")
    assert_same(kvjax.load_cache(path), cache)
    info, arrays = of(path)
    assert info["format"] == 2 and "next_position" in arrays
    assert {name for name in arrays if name.startswith("layers[1].") and "state" not in name} == {
        f"layers[1].{name}" for name in ("key", "value", "position")
    }
    said = kvjax.cache_info(path)
    assert (said["cache_bytes"], said["kind"]) == (cache.nbytes, "plain")


def test_layers_that_do_not_fit_each_other_are_refused(path):
    kvjax.save_cache(path, tiny("h2o", layers=3, windows=(2, None, 1)), policy="h2o")
    info, whole = of(path)
    for changed, said in [
        ({"layers[1].position": None}, "lacks the array layers[1].position"),
        ({"layers[0].position": None}, "lacks the array layers[0].position"),
        ({"layers[1].key": np.zeros((1, 1, 4, 3), "float32")}, "layers[1].value is float32 (1, 1, 4, 4); expected"),
        ({"layers[2].position": np.zeros((), "int32")}, "slots is 0"),
        ({"layers[3].key": np.zeros((1, 1, 4, 4), "float32")}, "has the array layers[3].key"),
        ({"key": np.zeros((1, 1, 4, 4), "float32")}, "has the array key"),
    ]:
        arrays = {name: array for name, array in (whole | changed).items() if array is not None}
        write(path, info, arrays)
        assert said in refused(kvjax.load_cache, path)
    kvjax.save_cache(path, tiny("h2o", layers=2), policy="h2o")
    in_format_1(path)
    info, whole = of(path)
    for name, shape in (("key", (3, 1, 1, 4, 4)), ("position", (2, 0, 1, 4))):
        write(path, info, whole | {name: np.zeros(shape, whole[name].dtype)})
        assert "expected one for each layer" in refused(kvjax.load_cache, path)


def test_a_full_cache_is_that_of_all_layers(path):
    kvjax.save_cache(path, filled("full", 2))
    assert kvjax.cache_info(path)["full_cache_bytes"] == B * (2 * 12 * K * (2 * D * 4 + 4) + 4)


def without(name: str):
    return lambda arrays: arrays.pop(name)


def zeros(name: str, *shape: int, dtype: str = "float32"):
    return lambda arrays: arrays.update({name: np.zeros(shape, dtype)})


def crafted(path: Path, policy: str, change) -> None:
    """Write a file in which some arrays were changed, and the sum with them."""
    save(path, policy)
    info, arrays = of(path)
    change(arrays)
    write(path, info, arrays)


@pytest.mark.parametrize(("given", "said"), calls("cache_files.txt"))
def test_what_is_no_cache_or_another_is_refused(path, given, said):
    _, options = eval(given)
    assert said in refused(kvjax.load_cache, path, **options)


def test_float64_without_x64_is_refused(path):
    kvjax.save_cache(path, filled("full"))
    info, arrays = of(path)
    arrays |= {name: arrays[name].astype("float64") for name in ("key", "value")}
    write(path, info | {"dtype": "float64"}, arrays)
    with pytest.warns(UserWarning, match="jax_enable_x64"):
        assert "key is float64" in refused(kvjax.load_cache, path)


@functools.cache
def small() -> tuple[bytes, KVCache | PagedCache]:
    with tempfile.TemporaryDirectory() as folder:
        cache = save(Path(folder, "cache"), budget=6, model="small")
        return Path(folder, "cache").read_bytes(), cache


@hypothesis.given(data=st.data())
@hypothesis.settings(
    max_examples=150, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], derandomize=True
)
def test_a_damaged_file_is_refused_in_a_sentence_or_holds_the_same(path, data):
    content, cache = small()
    header = 8 + int.from_bytes(content[:8], "little")
    if data.draw(st.booleans()):
        damaged = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        place = data.draw(st.one_of(st.integers(0, header - 1), st.integers(0, len(content) - 1)))
        byte = data.draw(st.integers(0, 255))
        damaged = content[:place] + bytes([byte]) + content[place + 1 :]
    path.write_bytes(damaged)
    try:
        loaded = kvjax.load_cache(path)
    except ValueError as error:
        assert "\n" not in str(error) and str(error).startswith(str(path))
    else:
        assert_same(loaded, cache)


@pytest.mark.parametrize(
    ("former", "today"),
    [
        ("h2o", "h2o+protect(recent=0)"),
        ("h2o+protect(recent=0.5)", "h2o"),
        ("h2o+protect(recent=0.5)+caote@layer", "h2o+caote@layer"),
    ],
)
def test_a_file_from_before_names_stood_for_methods_is_of_the_policy_that_it_was(path, monkeypatch, former, today):
    """Its state has the links that it had, of which one may be gone."""
    cache = filled(former)
    monkeypatch.setattr(kvjax, "__version__", "0.2.0")
    kvjax.save_cache(path, cache, policy=former)
    monkeypatch.undo()
    assert kvjax.cache_info(path)["policy"] == today
    loaded = kvjax.load_cache(path, policy=today)
    assert jax.tree.structure(loaded.state) == jax.tree.structure(filled(today).state)
    for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(one, other)
    if former != today:
        assert "was saved with the policy" in refused(kvjax.load_cache, path, policy=former)
