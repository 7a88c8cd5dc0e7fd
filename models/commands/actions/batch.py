"""The command line of `python -m models.batch`: a file of prompts in, a file of answers out, by continuous batching.

Each answer is written as it ends, as one line of JSON, so a killed command loses only answers that were not complete.
The same command then makes the missing ones.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import zlib
from typing import IO, Any, NamedTuple

import jax

import models
from kvjax._src.chains import policy_of
from kvjax.schedule import moments
from models import commands, files, hosts
from models.batching import Engine
from models.commands import distributed, provenance
from models.commands.programs import make_room
from models.commands.shared_flags import mesh_of, read_prompts, run_settings, with_template_values
from models.networks import load_networks, wanted_by
from models.sampling import Sampling

FIELDS = {"prompt": str, "id": object}
BEGINNING = b'{"line": '  # of every line that is written


class Asked(NamedTuple):
    """One line of the prompts: its number from 1, its text, and the ``id`` that its answer repeats."""

    line: int
    prompt: str
    id: Any = None

    @property
    def digest(self) -> str:
        """Return a checksum of the text, by which an answer is known to be this prompt's."""
        return f"{zlib.crc32(self.prompt.encode(errors='surrogatepass')):08x}"  # JSON can hold lone surrogates


def command(flags: argparse.Namespace) -> None:
    distributed.join(flags)
    asked = read_prompts(flags.prompts, FIELDS, lambda fields, line: Asked(line, fields["prompt"], fields.get("id")))
    policy = policy_of(flags.policy)
    when, evict_every = moments(policy, flags.when, flags.evict_every)
    budget = None if flags.budget is None else commands.parse_budget(flags.budget)
    model, tokenizer = models.load(flags.model, dtype=flags.dtype, mesh=mesh_of(flags))
    tokenizer = with_template_values(flags, commands.check_tokenizer(flags.model, tokenizer))
    networks = load_networks(flags.networks, flags.model, model, [wanted_by(policy)], dtype=flags.dtype)
    policy = models.with_repeat_prompt(policy, tokenizer)
    chosen = run_settings(flags)
    run = dict(
        model=flags.model, policy=str(policy_of(flags.policy) or "full"), budget=budget, when=when, chat=flags.chat,
        seed=flags.seed, **chosen | dict(evict_every=evict_every),
        dtype=model.embedding[...].dtype.name,
        fingerprints=provenance.of_run(model, tokenizer, networks),
    )  # fmt: skip
    files.check_outputs([flags.out])
    # The first of several processes has the answers; what the others write is dropped.
    with flags.out.open("a+b") if hosts.first() else tempfile.TemporaryFile() as file:
        files.lock(file, flags.out)
        found, failed_before = resume(file, asked, run)
        done = set(hosts.from_first(lambda: sorted(found)))
        engine = Engine(
            model, rows=flags.rows, policy=policy, budget=budget, when=flags.when, block=flags.block,
            evict_every=flags.evict_every, max_new_tokens=flags.max_new_tokens, longest_prompt=flags.longest_prompt,
            cache_dtype=flags.cache_dtype, networks=networks or None,
        )  # fmt: skip
        begun, tokens, failed = time.monotonic(), 0, 0
        sampling = {name: chosen[name] for name in Sampling._fields}
        waiting: dict[int, tuple[Asked, int]] = {}
        answers: dict[int, list[int]] = {}
        with commands.progress_bar("prompt", total=len(asked)) as bar:
            bar.update(len(done))
            for prompt in asked:
                if prompt.line in done:
                    continue
                key = jax.random.fold_in(jax.random.key(flags.seed), prompt.line)
                try:
                    text = tokenizer.chat([{"role": "user", "content": prompt.prompt}]) if flags.chat else prompt.prompt
                    ids = tokenizer.encode(text, add_special_tokens=not flags.chat)
                    handle = engine.submit(ids, key=key, **sampling)
                except ValueError as error:
                    failed += 1
                    if failed_before.get(prompt.line) != commands.sentence(error):
                        _write(file, prompt, run, {"error": commands.sentence(error)})
                    bar.update()
                    continue
                waiting[handle], answers[handle] = (prompt, len(ids)), []
            for made in engine.run():
                answers[made.handle].append(made.token)
                tokens += 1
                if made.ended:
                    make_room()  # prompts of many lengths have many programs
                    prompt, length = waiting.pop(made.handle)
                    ids = answers.pop(made.handle)
                    figures = {"prompt_tokens": length, "new_tokens": len(ids), "text": tokenizer.decode(ids)}
                    _write(file, prompt, run, figures | {"tokens": ids})
                    bar.set_postfix(tokens_s=round(tokens / (time.monotonic() - begun)))
                    bar.update()
    seconds, answered = time.monotonic() - begun, len(asked) - failed
    print(
        f"{answered} answers in {flags.out}: {len(done)} were there, {answered - len(done)} are new "
        f"({tokens:,} tokens in {seconds:,.1f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s with the prompts)."
    )
    if failed:
        raise ValueError(f"{failed} of {len(asked)} prompts failed; the 'error' in their lines says why.")


def resume(file: IO[bytes], asked: list[Asked], run: dict[str, Any]) -> tuple[set[int], dict[int, str]]:
    """Read which prompts a file answers, and cut off what a kill left at its end.

    Args:
        file: open for reading and appending.
        run: the settings of the run, which every answer repeats.

    Returns:
        The lines of the prompts that are answered, and the errors of those that failed, which are tried again.
    """
    file.seek(0)
    content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    tail = content[len(whole) :]
    if not (tail.startswith(BEGINNING) or BEGINNING.startswith(tail)):
        raise ValueError(f"{file.name} does not end in an answer of models.batch; name another --out.")
    digests, wanted = {prompt.line: prompt.digest for prompt in asked}, json.loads(json.dumps(run))
    done, failed = set(), {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            answer = json.loads(line)
            of, digest, made_by = answer["line"], answer["prompt"], answer["run"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f"{file.name}, line {number}, is no answer of models.batch; name another --out.") from None
        if made_by != wanted:
            differing = sorted(name for name in {*made_by, *wanted} if made_by.get(name) != wanted.get(name))
            raise ValueError(f"{file.name} is of another run (other {', '.join(differing)}); name another --out.")
        if digests.get(of) != digest:
            raise ValueError(f"{file.name}, line {number}, answers another prompt than line {of}; name another --out.")
        if "error" in answer:
            failed[of] = answer["error"]
        else:
            done.add(of)
    if tail:
        file.truncate(len(whole))
    return done, failed


def _write(file: IO[bytes], prompt: Asked, run: dict[str, Any], figures: dict[str, Any]) -> None:
    own = {"line": prompt.line, "prompt": prompt.digest} | ({} if prompt.id is None else {"id": prompt.id})
    file.write((json.dumps(own | figures | {"run": run}) + "\n").encode())
    file.flush()
    os.fsync(file.fileno())
