"""Generations longer than the cache: what a text told early, asked at its end, and how well the text is predicted.

The text stands for an answer that the model writes: each of its tokens goes through decode
(:func:`models.teacher_forced`), where the policy evicts every few steps. No large model is needed for that. The first
half of the text states facts and, as often, results that are worked out on the way ("Since 1203 and 3516 make 4719, the
code of amber falcon is 4719."), among prose of this project. Behind the last token each of them is asked for, from a
copy of the cache; nothing is evicted then. The perplexity is that of the text's own tokens, and is compared with the
full cache's on the same texts.

With ``--when block`` a policy evicts in decode as it does by default, with ``--when published`` as in its paper.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from tqdm import tqdm

import models
from evals import answering, command_line, evaluator, loglikelihood, needle, prose, results, run_settings, tasks
from evals.run_settings import Setting
from models import commands, hosts
from models.commands.programs import make_room
from models.commands.shared_flags import add_shared_flags, count

EXAMPLES = """examples:
  python -m evals generation --model smollm2-answers --lengths 4000 --budgets 256,512 --samples 4 --out runs/generation
      --plot out.png
  python -m evals generation --lengths 400 --budgets 128 --samples 2 --policies full,tova
"""
TITLE = "Facts and results of a generation, asked at its end"
POLICIES = "full,h2o,tova,snapkv,rkv,kvzip"
TASKS = ("facts", "results")


def draw(seed: int, tokenizer: Any, length: int, facts: int) -> list[tasks.Sample]:
    """Draw a text of ``length`` tokens, and a question about each fact and each result that it states.

    Args:
        seed, tokenizer: see :func:`evals.tasks.needle`.
        length: the largest number of the text's tokens, with BOS.
        facts: the number of facts, and that of results.

    Returns:
        A fact's question, then a result's, and so on: prompts of one text.

    Raises:
        ValueError: the length does not hold the facts.
    """
    rng = np.random.default_rng([seed, length, facts])
    stated: list[tasks.Fact] = []
    while len(stated) < 2 * facts:
        stated.append(tasks.random_fact(rng, stated, alike=0.3 if stated else 0.0))
    state = (tasks.statement, functools.partial(_sum_statement, rng))
    told = [state[number % 2](fact) for number, fact in enumerate(stated)]
    size = functools.partial(_size, tokenizer)
    room = length - 1 - sum(size(" " + sentence) for sentence in told)
    filler, drawn = list[str](), prose.draw(rng)
    while room > 0:
        filler.append(next(drawn))
        room -= size(" " + filler[-1])
    places = np.sort(rng.random(len(told))) / 2
    order = rng.permutation(len(told))
    while True:
        text = " ".join(tasks.spread(filler, [told[number] for number in order], places))
        end = len(tasks.ids(tokenizer, text))
        if end <= length:
            break
        if not filler:
            raise ValueError(
                f"{facts} facts and as many results take {end} tokens, more than the length {length}; lower --facts."
            )
        filler.pop()
    found = []
    for fact in stated:
        prompt = f"{text}\n{tasks.question(fact)}\n{tasks.cue(fact)}"
        tokens = tasks.ids(tokenizer, prompt)
        answer = tasks.ids(tokenizer, f"{prompt} {fact.value}")[len(tokens) :]
        found.append(tasks.Sample(prompt, fact.value, tokens, answer, end))
    return found


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    command_line.add_model_flags(flags)
    command_line.add_setting_flags(flags, budgets="256,512", when="block")
    flags.add_argument("--lengths", default="4000", help="tokens of a text; several by comma")
    flags.add_argument("--samples", type=count, default=4, help="texts per length")
    flags.add_argument("--facts", type=count, default=5, help="facts per text, and as many results")
    add_shared_flags(flags, "out")
    flags.set_defaults(question="unknown", policies=POLICIES, batch=4)


def command(flags: argparse.Namespace) -> None:
    """Run the evaluation: check, feed the texts, ask, print the table, write JSON and picture."""
    evaluator.command(flags, make_groups, title=TITLE, notes=_notes, check=check, answer=run)


def check(flags: argparse.Namespace) -> None:
    """Check the flags before any work."""
    command_line.check_sizes(flags)
    check_settings(run_settings.make_settings(flags, ("unknown",)))


def check_settings(settings: Sequence[Setting]) -> None:
    """Raise ValueError unless each setting evicts while the text comes in, to a number of slots."""
    run_settings.refuse_selections(settings, "they keep all tokens, so no generation is too long for them")
    run_settings.refuse_reading_budgets(settings, "the text comes in token by token")
    for setting in settings:
        if isinstance(setting.budget, float):
            raise ValueError(f"the budget is {setting.budget}, a share of a text that is not known yet; give slots.")
        if setting.evicting is not None and not setting.moments[1]:
            raise ValueError(
                f"{setting.policy!r} never evicts in decode with --when {setting.when}; give --when block."
            )


def make_groups(flags: argparse.Namespace, config: models.Config, tokenizer: models.Tokenizer) -> list[evaluator.Group]:
    """Make two groups per length, of facts and of results; both ask about the same texts."""
    groups = []
    for length in command_line.check_sizes(flags):
        texts = [draw(flags.seed + 1_000 * i, tokenizer, length, flags.facts) for i in range(flags.samples)]
        longest = max(len(sample.answer_tokens) for text in texts for sample in text)
        for first, task in enumerate(TASKS):
            samples = [sample._replace(text=i) for i, text in enumerate(texts) for sample in text[first::2]]
            groups.append(
                evaluator.Group(
                    task, length, len(samples), functools.partial(list, samples), longest,
                    lambda answer, sample: float(needle.exact(answer.tokens, sample)), end=(), questions=("unknown",),
                )
            )  # fmt: skip
    return groups


def read(
    model: models.Decoder, texts: Sequence[Sequence[int]], setting: Setting, feed: answering.Feed, reserve: int = 0
) -> tuple[Any, Float[np.ndarray, "B"]]:
    """Feed texts through decode under a setting; the full cache, which evicts nothing, reads them in blocks.

    ``reserve`` are slots of the full cache for what is asked afterwards. Return the cache, and the mean loss of each
    text's tokens, in nats.
    """
    tokens, lengths = answering.padded(texts), np.array([len(text) for text in texts])
    given: dict[str, Any] = dict(block=feed.block, cache_dtype=setting.cache_dtype, networks=feed.aids.of(setting))
    if setting.evicting is None:
        cache, hidden = models.hidden_states(model, tokens, lengths=lengths, reserve=reserve, **given)
    else:
        cache, hidden = models.teacher_forced(
            model, tokens, lengths=lengths, policy=feed.aids.policy(setting), budget=setting.budget,
            evict_every=setting.moments[1], **given,
        )  # fmt: skip
    chosen = hosts.fetched(loglikelihood.log_probabilities(model, hidden[:, :-1], tokens[:, 1:], None)[0])
    counted = np.arange(1, tokens.shape[1]) < lengths[:, None]
    loss = -np.where(counted, chosen, 0).sum(axis=1, dtype=np.float64) / (lengths - 1)
    return cache, loss


def run(
    model: models.Decoder, tokenizer: models.Tokenizer, groups: Sequence[evaluator.Group], settings: Sequence[Setting],
    store: results.Results, *, labels: Mapping[str, Any], progress: tqdm, feed: answering.Feed,
) -> None:  # fmt: skip
    """Read the texts that a store lacks answers about, and ask: all groups of a length at once."""
    for _, together in itertools.groupby(groups, lambda group: group.length):
        of_length = list(together)
        drawn = [group.draw() for group in of_length]
        for setting in [one for one in settings if one.question == "unknown"]:
            known = [evaluator.open_samples(group, [setting], store, labels) for group in of_length]
            missing = [rows[setting] for _, rows in known]
            progress.set_description(setting.title())
            progress.update(sum(group.size for group in of_length) - sum(map(len, missing)))
            texts = sorted({samples[row].text for samples, rows in zip(drawn, missing, strict=True) for row in rows})
            for chosen, fed in answering.batches(model, texts, feed.batch):
                make_room()
                asked = [
                    [(number, row) for number, samples in enumerate(drawn) for row, sample in enumerate(samples)
                     if sample.text == text]
                    for text in fed
                ]  # fmt: skip
                for new in _questions(model, tokenizer, of_length, drawn, setting, asked, feed):
                    store.add(
                        {**known[number][0][setting], "sample": row, **record}
                        for number, row, record in new[: len(chosen)]
                        if row in missing[number]
                    )
                    progress.update(sum(row in missing[number] for number, row, _ in new[: len(chosen)]))


def _questions(
    model: models.Decoder,
    tokenizer: models.Tokenizer,
    groups: Sequence[evaluator.Group],
    drawn: Sequence[Sequence[tasks.Sample]],
    setting: Setting,
    asked: Sequence[Sequence[tuple[int, int]]],
    feed: answering.Feed,
) -> Any:
    """Read a batch of texts, and yield the records of the texts' next questions: group, sample and figures of each.

    ``asked`` are, for each text, the group and the number of each of its samples.
    """
    of_text = [[drawn[number][row] for number, row in samples] for samples in asked]
    if len({len(samples) for samples in of_text}) > 1:
        raise ValueError("some texts are asked fewer questions than others; give a first that is a multiple of them.")
    tails = [[sample.tokens[sample.context_end :] for sample in samples] for samples in of_text]
    widest, new = max(len(tail) for text in tails for tail in text), max(group.new_tokens for group in groups)
    texts = [samples[0].tokens[: samples[0].context_end] for samples in of_text]
    cache, loss = read(model, texts, setting, feed, reserve=widest + new)
    size = cache.nbytes // len(texts)
    for place in range(len(tails[0])):
        fed = [text[place] for text in tails]
        out = models.generate(
            model, answering.padded(fed, widest), lengths=np.array(list(map(len, fed))), cache=cache, block=feed.block,
            max_new_tokens=new, end=(),
        )  # fmt: skip
        made = hosts.fetched(out.tokens)
        records = []
        for text, tokens in enumerate(made.tolist()):
            number, row = asked[text][place]
            answer = evaluator.Answer(tokens, tokenizer.decode(tokens))
            figures = {
                "score": groups[number].score(answer, drawn[number][row]), "answer": answer.text,
                "text": drawn[number][row].text, "loss": float(loss[text]), "prompt_tokens": len(texts[text]),
                "new_tokens": len(tokens), "cache_bytes": size, "peak_cache_bytes": size, "prefill": [0, 0],
                "decode": [0, 0],
            }  # fmt: skip
            records.append((number, row, figures))
        yield records


def _notes(flags: argparse.Namespace) -> list[str]:
    texts = commands.split_list(flags.lengths)
    return [f"{flags.samples} texts of {', '.join(texts)} tokens, {flags.facts} facts and {flags.facts} results each"]


def _size(tokenizer: Any, text: str) -> int:
    return len(tasks.ids(tokenizer, text)) - 1  # without BOS


def _sum_statement(rng: np.random.Generator, fact: tasks.Fact) -> str:
    """State a fact as the result of a sum."""
    first = int(rng.integers(int(fact.value) + 1))
    return (
        f"Since {first} and {int(fact.value) - first} make {fact.value}, the {fact.attribute} of {fact.key} is "
        f"{fact.value}."
    )
