"""Several processes that run commands together end with what one process with all the devices ends with."""

import functools
import json
import os
import socket
import subprocess
import sys

import jax
import pytest

import models
from models import hosts
from models.commands import distributed
from tests.models import reference, run_on_hosts

CODE = "def add(a, b):\n    return a + b\n" * 8
PROMPTS = [  # a cache that grows, one budget for each head, and one for all heads of a layer
    {"prompt": CODE},
    {"prompt": CODE, "policy": "snapkv+caote", "budget": 48},
    {"prompt": CODE, "policy": "h2o@layer(cap=2)", "budget": 48},
]
ANSWERS_ONLY = ["--answers-only"]  # and one prompt

JOINS_AND_WAITS = """
import argparse, time
from models.commands import distributed
from models.commands.shared_flags import HOSTS, add_shared_flags
flags = argparse.ArgumentParser()
add_shared_flags(flags, *HOSTS)
distributed.join(flags.parse_args())
print("joined", flush=True)
time.sleep(99)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with eight heads, and prompts."""
    folder = tmp_path_factory.mktemp("hosts")
    shipped, tokenizer = models.load("retriever")
    config = models.Config(
        shipped.config.vocab_size, 64, 96, num_layers=2, num_heads=8, num_kv_heads=8, max_positions=512,
        bos=shipped.config.bos, eos=shipped.config.eos,
    )  # fmt: skip
    model = reference.decoder(config)
    models.save(folder / "model", model, tokenizer.backend)
    for only in ([], ANSWERS_ONLY):
        prompts(folder, only).write_text("\n".join(map(json.dumps, PROMPTS[-1:] if only else PROMPTS)))
    return folder


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """Gives what one process with eight devices makes; not this one, in which pytest changes built-in prose."""

    @functools.cache
    def made(*only):
        out = tmp_path_factory.mktemp("alone")
        (printed,) = work(folder, out, 1, 8, *only)
        return (tokens_in(printed), *written(out))

    return made


def prompts(folder, only):
    return folder / ("prompt.jsonl" if only else "prompts.jsonl")


def work(folder, out, processes, devices, *only):
    """Return what each of the processes prints that run all commands together, or the first one alone."""
    given = [folder / "model", prompts(folder, only), out, *only]
    running = start(processes, devices, run_on_hosts.__file__, *given)
    printed, errors = zip(*[process.communicate(timeout=900) for process in running], strict=True)
    assert [process.returncode for process in running] == [0] * processes, errors
    return printed


def tokens_in(printed):
    return [json.loads(line)["tokens"] for line in printed.splitlines() if line.startswith('{"command')]


def written(out):
    """Return what the commands wrote into a folder: tokens and counts, and losses."""
    if not (out / "answers.jsonl").exists():
        return {}, {}
    lines = {name: (out / name).read_text().splitlines() for name in ("ruler/samples.jsonl", "answers.jsonl")}
    samples, answers = (list(map(json.loads, own)) for own in lines.values())
    coref, fidelity = (json.loads((out / f"{name}.json").read_text())["results"] for name in ("coref", "fidelity"))
    exact = {
        "ruler": {record["sample"]: (record["answer"], record["cache_bytes"]) for record in samples},
        "batch": [(answer["line"], answer["tokens"]) for answer in answers],
        "coref": [row["guessed"] for row in coref],
        "fidelity": [row["retained"] for row in fidelity],
    }
    tuned = json.loads((out / "tuned/summary.json").read_text())["held_out_loss"]
    losses = {f"{policy} {when}": loss for policy, own in tuned.items() for when, loss in own.items()}
    return exact, losses | {row["policy"]: row["kl"] for row in fidelity}


def start(processes, devices, *command):
    """Start a command in several processes with some CPU devices each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    environment |= {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    joined = ["--coordinator", address, "--processes", str(processes), "--process-id"]
    piped = dict(cwd=run_on_hosts.ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return [
        subprocess.Popen([sys.executable, *map(str, command), *joined, str(number)], **piped)
        for number in range(processes)
    ]


@pytest.mark.parametrize(
    "processes, devices, only",
    [
        pytest.param(2, 4, ANSWERS_ONLY, marks=pytest.mark.matrix),
        pytest.param(4, 2, [], marks=pytest.mark.nightly),  # six commands in four processes, each of which compiles all
    ],
)
def test_several_processes_give_what_one_gives(folder, alone, tmp_path, processes, devices, only):
    printed = work(folder, tmp_path, processes, devices, *only)
    (exact, losses), (tokens, exact_alone, losses_alone) = written(tmp_path), alone(*only)
    assert len(tokens) == (1 if only else len(PROMPTS)) and bool(exact) == (not only)
    assert (tokens_in(printed[0]), exact) == (tokens, exact_alone)
    assert losses == pytest.approx(losses_alone, rel=1e-4)
    assert [text.count("h2o@layer") > 0 for text in printed] == [True] + [False] * (processes - 1)
    # Every matrix is split eight ways; the norms are whole on every device.
    with run_on_hosts.bytes_read() as whole:
        models.load(folder / "model")
    read = [json.loads((tmp_path / f"bytes-{number}.json").read_text()) for number in range(processes)]
    assert max(read) < 1.02 * sum(whole) / processes


def test_one_process_reads_each_part_once(folder):
    def read(mesh):
        with run_on_hosts.bytes_read() as sizes:
            models.load(folder / "model", mesh=None if mesh is None else models.parse_mesh(mesh))
        return sum(sizes)

    assert read("tensor=8") == read("data=4,tensor=2") == read(None)


def test_one_process_is_the_first():
    assert hosts.first() and not hosts.several()
    assert hosts.from_first(lambda: {"a": [1]}) == {"a": [1]}
    assert hosts.fetched(jax.numpy.arange(3)).tolist() == [0, 1, 2]


def test_sigterm_ends_a_joined_process_with_one_sentence():
    (running,) = start(1, 1, "-c", JOINS_AND_WAITS)
    assert running.stdout.readline() == "joined\n"
    running.terminate()
    _, errors = running.communicate(timeout=60)
    assert (running.returncode, errors) == (143, f"kvjax: error: {distributed.TERMINATED}\n")


@pytest.mark.matrix
def test_a_killed_process_ends_the_other():
    running = start(2, 1, "-c", JOINS_AND_WAITS)
    assert running[0].stdout.readline() == "joined\n"  # what the second one prints is dropped
    running[1].kill()
    _, errors = running[0].communicate(timeout=90)
    assert running[0].returncode not in (0, 2)
    assert distributed.LOST in errors or "distributed service detected fatal errors" in errors, errors
