"""lm-evaluation-harness under a KV budget: its tasks, and a model class ``kvjax`` in its registry.

A choice's likelihood is that of its tokens after the compressed context: the context is fed as a prompt and evicted
from, and the choice follows without further eviction. A rolling likelihood (perplexity) evicts after every block, so
each token is predicted from what earlier evictions kept. A context shorter than the budget loses nothing: give ratios
or small budgets where prompts are short.

With ``select=`` nothing is evicted. Likelihoods come from a forward in which every query reads what the selection keeps
(evals/selections.py), and answers are decoded with it step by step.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

import kvjax
import models
from evals import (
    answering,
    command_line,
    documents,
    evaluator,
    loglikelihood,
    report,
    run_settings,
    selections,
    simulator,
)
from evals import results as recorded
from evals.loglikelihood import TokenPredictions
from kvjax._src import install
from kvjax._src.checks import check_names
from kvjax._src.quantise import check_dtypes
from kvjax.schedule import When
from kvjax.sources import SOURCES
from models import commands, files
from models.commands import provenance
from models.commands.programs import make_room
from models.commands.shared_flags import add_shared_flags, at_least, count
from models.networks import load_networks, wanted_by
from models.progress import progress_bar
from models.sizing import checked_budget

EXAMPLES = """examples:
  python -m evals lm_eval --tasks hellaswag,piqa --model_args pretrained=path/to/Llama-3.2-1B
      --model_args "pretrained=path/to/Llama-3.2-1B,policy=snapkv(window=8)+caote,budget=0.5" --limit 100
  python -m evals lm_eval --tasks piqa --model_args pretrained=path/to/Llama-3.2-1B,select=quest,budget=0.5
  python -m evals lm_eval --tasks mine --include_path tasks --model_args pretrained=retriever,policy=tova,budget=64
"""


class Arguments(NamedTuple):
    """Take what ``--model_args`` may say beside the model, with the harness' names.

    Attributes:
        policy, budget, block, when, cache_dtype: see ``models.prefill``.
        select: chooses what each head reads, in place of a policy: a source, or a policy as simulated selection. The
            budget is then the share of the tokens that are read.
        networks: the folder of a small network that the policy or ``select`` reads; by default the model's own.
        sinks: the number of first tokens that a selection always reads, beyond its budget.
        max_length: the most tokens of a context and its continuation; the model's limit by default.
        max_gen_toks: the number of new tokens where a task sets none.
    """

    policy: str = "full"
    budget: int | float | str | None = None
    block: int = 128
    when: When = "prompt"
    select: str | None = None
    networks: str | None = None
    sinks: int = 4
    batch_size: int | str = 8
    max_length: int | None = None
    max_gen_toks: int = 256
    dtype: str | None = None
    cache_dtype: str | None = None


LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # in the harness' order


@functools.cache
def model_class() -> type:
    """Return the class ``kvjax`` of lm-evaluation-harness's registry; the first call registers it."""
    try:
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.registry import register_model
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    except ImportError:
        raise ImportError(install.needed(["lm-evaluation-harness"], "harness")) from None

    class KvjaxLM(TemplateLM):  # type: ignore[misc, valid-type]
        """A decoder under a policy: ``pretrained`` is 'retriever', a folder, or a hub name; see :class:`Arguments`."""

        def __init__(self, pretrained: str = "retriever", **arguments: Any) -> None:
            super().__init__()
            given = _arguments(arguments)
            select, dtype = given.select, given.dtype
            self.settings: dict[str, Any] = check_settings(given)
            self.batch = int(given.batch_size) if str(given.batch_size).isdigit() and int(given.batch_size) > 0 else 8
            self.model, self.text = command_line.load_with_tokenizer(str(pretrained), dtype=dtype)
            asking = models.with_repeat_prompt(self.settings.get("policy"), self.text)
            if asking is not None and asking.needs.reconstruction is not None:
                self.settings["policy"] = asking
            self.selection = None if select is None else selections.parse_selection(str(select))
            wanted = wanted_by(asking) if self.selection is None else self.selection.wanted
            folders = [] if given.networks is None else [str(given.networks)]
            self.networks = load_networks(folders, str(pretrained), self.model, [wanted], dtype=dtype)
            if self.selection is None and self.networks:
                self.settings["networks"] = self.networks
            self.max_length = given.max_length or self.model.config.max_positions
            self.max_gen_toks = given.max_gen_toks

        @classmethod
        def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None) -> Any:
            more = {name: value for name, value in (additional_config or {}).items() if value is not None}
            return cls(**_parse_arguments(arg_string), **more)

        @property
        def eot_token_id(self) -> int:
            end = (*self.model.config.eos, self.text.eos, self.text.bos)
            return next((int(token) for token in end if token is not None), 0)

        @property
        def prefix_token_id(self) -> int:
            return self.eot_token_id if self.text.bos is None else self.text.bos

        @property
        def tokenizer_name(self) -> str:
            return "kvjax"

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
            if add_special_tokens is None:  # a chat template may have written BOS already
                bos = self.text.special_tokens.get("bos_token")
                add_special_tokens = not bos or not string.startswith(bos)
            return self.text.encode(string, add_special_tokens=add_special_tokens)

        def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
            before, behind = super()._encode_pair(context, continuation)
            if not behind:  # one token reaches across, as ": C" may
                blanks = context[len(context.rstrip()) :]
                behind = self.text.continuation(blanks + continuation, before[-1])
            if not behind:
                raise ValueError(f"a choice behind {context[-40:]!r} is empty; give each choice of the task some text.")
            return before, behind

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            text = self.text.chat(chat_history, add_generation_prompt)
            return text if add_generation_prompt else _to_be_continued(text, chat_history[-1]["content"])

        def _loglikelihood_tokens(
            self, requests: Any, disable_tqdm: bool = False, **unused: Any
        ) -> list[tuple[float, bool]]:
            sequences = [[*context, *continuation][-self.max_length - 1 :] for _, context, continuation in requests]
            counts = [len(continuation) for _, _, continuation in requests]
            if max(counts, default=0) > self.max_length:
                raise ValueError(f"a choice has {max(counts)} tokens, but max_length is {self.max_length}; give more.")
            bar = progress_bar("request", total=len(requests), desc="likelihoods", quiet=disable_tqdm)
            answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)

            def keep(row: int, found: TokenPredictions) -> None:
                end = found.log_probability[-counts[row] :], found.greedy[-counts[row] :]
                answers[row] = (float(end[0].sum()), bool(end[1].all()))
                if requests[row][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[row][0], answers[row])
                bar.update()

            self._predict(sequences, counts, on_row=keep)
            bar.close()
            return answers

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            answers = []
            for request in progress_bar("request", over=requests, desc="rolling likelihoods", quiet=disable_tqdm):
                tokens = self.tok_encode(request.args[0], add_special_tokens=False)
                windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
                pairs = [make_disjoint_window(window) for window in windows]
                sequences = [[*context, *predicted] for context, predicted in pairs]
                found = self._predict(sequences)
                total = sum(
                    float(row.log_probability[-len(predicted) :].sum())
                    for row, (_, predicted) in zip(found, pairs, strict=True)
                )
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
                answers.append(total)
            return answers

        def _predict(self, sequences: Any, counts: Any = None, on_row: Any = None) -> list[TokenPredictions]:
            if self.selection is not None:
                sparsity, sinks = round(1 - self.settings["budget"], 6), self.settings["sinks"]
                simulation = simulator.Simulation(self.selection, sparsity, self.networks, sinks)
                return loglikelihood.simulate(
                    self.model, sequences, simulation, block=self.settings["block"], batch=self.batch, on_row=on_row
                )
            # Text without a prompt has no end at which to evict once, so each block is evicted from.
            settings = self.settings if counts is not None else {**self.settings, "when": "block"}
            return loglikelihood.predict(self.model, sequences, counts, **settings, batch=self.batch, on_row=on_row)

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            bar = progress_bar("request", total=len(requests), desc="answers", quiet=disable_tqdm)
            answers = [""] * len(requests)
            alike: dict[str, list[int]] = {}
            for row, request in enumerate(requests):
                alike.setdefault(repr(sorted(request.args[1].items())), []).append(row)
            for rows in alike.values():
                asked = requests[rows[0]].args[1]
                for start in range(0, len(rows), self.batch):
                    make_room()
                    chosen = rows[start : start + self.batch]
                    said = self._generate([requests[row].args[0] for row in chosen], asked)
                    for row, text in zip(chosen, said, strict=True):
                        answers[row] = text
                        self.cache_hook.add_partial("generate_until", requests[row].args, text)
                        bar.update()
            bar.close()
            return answers

        def _generate(self, contexts: Sequence[str], asked: dict[str, Any]) -> list[str]:
            if asked.get("do_sample") is not False and float(asked.get("temperature") or 0) > 0:
                raise ValueError("the task samples its answers, but kvjax answers greedily; set do_sample=False.")
            until = asked.get("until") or []
            until = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
            new = int(next((asked[name] for name in LIMITS if asked.get(name) is not None), self.max_gen_toks))
            prompts = [self.tok_encode(context)[-max(self.max_length - new, 1) :] for context in contexts]
            lengths = np.array([len(prompt) for prompt in prompts])
            said: list[list[int]] = [[] for _ in prompts]
            ended = [False] * len(prompts)
            settings = dict(self.settings)
            if self.selection is not None:
                if self.selection.source is None:
                    raise ValueError(
                        f"select is {self.selection}, which is simulated on whole texts only, but the task decodes "
                        f"answers; give policy=..., or a source: {', '.join(SOURCES.names())}."
                    )
                settings.update(select=self.selection.source, networks=self.networks)
            for step, (token, _) in enumerate(
                models.stream(self.model, answering.padded(prompts), lengths=lengths, max_new_tokens=new, **settings)
            ):
                for row, one in enumerate(token.tolist()):
                    if one >= 0 and one not in self.model.config.eos:
                        said[row].append(one)
                    else:
                        ended[row] = True
                if until and step % 8 == 7:
                    for row, text in enumerate(map(self._raw, said)):
                        ended[row] = ended[row] or any(stop in text for stop in until)
                    if all(ended):
                        break
            return [self._ended(row, until) for row in said]

        def _raw(self, row: Sequence[int]) -> str:
            return self.text.decode(row, skip_special_tokens=False)

        def _ended(self, row: Sequence[int], until: Sequence[str]) -> str:
            """Return an answer up to its first stop, which may be the text of a special token."""
            text = self.text.decode(row)
            special = [stop for stop in until if stop not in text and stop in self._raw(row)]
            if special:
                heads = (row[:n] for n in range(1, len(row) + 1))
                text = self.text.decode(next(head for head in heads if any(x in self._raw(head) for x in special)))
            return text[: min((text.find(stop) for stop in until if stop in text), default=len(text))]

    register_model("kvjax")(KvjaxLM)
    return KvjaxLM


def _to_be_continued(text: str, last: str) -> str:
    """Return a chat's text up to the end of its last message, which an answer continues."""
    at = text.rfind(last.strip())
    if at < 0 or not last.strip():
        raise ValueError(f"the chat template changes the last message, {last[:40]!r}, so it cannot be continued.")
    return text[: at + len(last if text.startswith(last, at) else last.strip())]


def _arguments(given: Mapping[str, Any]) -> Arguments:
    """Return what the model's arguments say beside the model, without the harness' own."""
    own = {name: value for name, value in given.items() if name not in ("pretrained", "device", "max_batch_size")}
    if unknown := set(own) - set(Arguments._fields):
        raise ValueError(f"the model kvjax has no argument {', '.join(sorted(unknown))}; see --help.")
    return Arguments(**own)


def check_settings(given: Arguments) -> dict[str, Any]:
    """Return the arguments of a run, checked before the model is loaded."""
    policy, budget, block, when, select = str(given.policy), given.budget, given.block, str(given.when), given.select
    sinks = given.sinks
    check_names("when", when, get_args(When))
    if not isinstance(block, int) or block < 1:
        raise ValueError(f"block is {block!r}; give at least 1.")
    for name in ("max_length", "max_gen_toks"):
        if not isinstance(value := getattr(given, name), int | None) or (value is not None and value < 1):
            raise ValueError(f"{name} is {value!r}; give at least 1.")
    if str(given.batch_size).lstrip("-").isdigit() and int(given.batch_size) < 1:
        raise ValueError(f"batch_size is {given.batch_size}; give at least 1.")
    unused = "when" if select is not None else "sinks"
    if getattr(given, unused) != Arguments._field_defaults[unused]:
        raise ValueError(f"{unused} was given, which a {'policy' if select is None else 'selection'} does not read.")
    dtype = {} if given.cache_dtype is None else {"cache_dtype": str(check_dtypes(given.cache_dtype))}
    if select is not None:
        if dtype:
            raise ValueError(f"select {select} is simulated on whole texts, without a cache; leave cache_dtype out.")
        if policy != "full":
            raise ValueError(f"both policy {policy} and select {select} were given; give one of them.")
        if not isinstance(sinks, int) or sinks < 0:
            raise ValueError(f"sinks is {sinks!r}; give at least 0.")
        share = None if budget is None else commands.parse_budget(str(budget))
        if not isinstance(share, float):
            raise ValueError(f"the budget of select {select} is {budget}; give the share that is read, such as 0.5.")
        return {"select": str(selections.parse_selection(str(select))), "budget": share, "block": block, "sinks": sinks}
    if policy == "full":
        if budget is not None:
            raise ValueError(f"a budget of {budget} was given without a policy; give policy=...")
        return {"policy": "full", "budget": None, "block": block, "when": "block", **dtype}
    parsed = kvjax.parse(policy)
    slots = checked_budget(parsed, None if budget is None else commands.parse_budget(str(budget)), block)
    return {"policy": str(parsed), "budget": slots, "block": block, "when": when, **dtype}


def _parse_arguments(text: str) -> dict[str, Any]:
    """Split ``name=value`` pairs at commas outside parentheses, and return them with numbers as numbers."""
    found: dict[str, Any] = {}
    for part in commands.split_list(text):
        name, equals, value = part.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise ValueError(f"{part!r} in the model's arguments is not name=value; write pretrained=...,policy=...")
        number = _number(value.strip())
        found[name.strip()] = value.strip() if number is None else number
    return found


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags, under the harness's own names where it has them."""
    flags.add_argument("--tasks", required=True, help="the harness's tasks, or yaml files; several by comma")
    flags.add_argument(
        "--model_args", action="append", required=True,
        help="pretrained=...,policy=... (or select=...),budget=...,block=...,when=...,cache_dtype=...; "
        "repeat it for more lines",
    )  # fmt: skip
    flags.add_argument(
        "--against",
        metavar="POLICY",
        help="the policy of one of the --model_args that each other is compared with, on the same samples (default: "
        f"{run_settings.RECENCY}, if it is among them)",
    )
    flags.add_argument("--model", default="kvjax", choices=["kvjax"], help="the name in the harness's registry")
    flags.add_argument("--include_path", type=Path, help="a folder with tasks of your own (yaml)")
    flags.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="read TASK.jsonl or TASK.parquet of a folder, with the fields that the task reads, not the hub's data",
    )
    flags.add_argument("--num_fewshot", type=at_least(0), help="examples per prompt (default: the task's)")
    flags.add_argument("--limit", type=count, help="use only the first so many samples of each task")
    add_shared_flags(flags, "batch", "seed", "json", "out", batch=8)


def command(flags: argparse.Namespace) -> None:
    """Run the harness: check, print one line per task, metric and model, write JSON."""
    with contextlib.ExitStack() as stack:
        _command(flags, stack)


def _command(flags: argparse.Namespace, stack: contextlib.ExitStack) -> None:
    given = [_parse_arguments(text) for text in flags.model_args]
    against = run_settings.baseline(flags)
    named = [_policy(check_settings(_arguments(arguments))) for arguments in given]
    if flags.against is not None and against not in named:
        raise ValueError(f"--against is {against}, but the --model_args have {', '.join(named)}; add one with it.")
    if flags.include_path is not None and not flags.include_path.is_dir():
        raise FileNotFoundError(f"there is no folder {flags.include_path}; give --include_path a folder with tasks.")
    files.check_outputs([flags.json])
    tasks = commands.listed("task", flags.tasks, "--tasks piqa")
    if flags.out is not None:
        files.check_folder(flags.out)
    kind = model_class()
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if flags.include_path is None else str(flags.include_path))
    unknown = [task for task in tasks if task not in manager.all_tasks and not Path(task).is_file()]
    if unknown:
        raise ValueError(f"the harness has no task {', '.join(unknown)}; list its tasks with: lm-eval ls tasks.")
    loaded, data = tasks, None
    if flags.data is not None:
        into = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        made = {task: _of_file(task, flags.data, manager.task_index.get(task), into) for task in tasks}
        loaded, data = [file for file, _ in made.values()], {task: digest for task, (_, digest) in made.items()}
    if flags.out is not None:
        flags.out.mkdir(parents=True, exist_ok=True)
        files.lock(stack.enter_context((flags.out / files.LOCK_FILE).open("ab")), flags.out)
    results: list[dict[str, Any]] = []
    fingerprints: dict[str, dict[str, str]] = {}
    for text, arguments in zip(flags.model_args, given, strict=True):
        model = kind(**{"batch_size": flags.batch, **arguments})
        fingerprints[text] = evaluator.digests(model.model, model.text, model.networks)
        if flags.out is not None:
            _check_answers(flags.out, text, fingerprints[text])
        try:
            found = simple_evaluate(
                model=model,
                tasks=loaded,
                num_fewshot=flags.num_fewshot,
                limit=flags.limit,
                task_manager=manager,
                use_cache=None if flags.out is None else str(flags.out / _cache_name(text)),
                random_seed=flags.seed,
                numpy_random_seed=flags.seed,
                torch_random_seed=flags.seed,
                fewshot_random_seed=flags.seed,
                log_samples=True,
            )
        except (ValueError, OSError, ImportError):
            raise
        except Exception as error:  # a task of the user's may raise anything
            raise ValueError(f"the harness could not run {flags.tasks} ({type(error).__name__}: {error}).") from error
        results += [{**r, "model_args": text, **model.settings} for r in lines_of(found)]
    comparisons = compare(results, against)
    report.show(
        _table(results), report.comparison_table(comparisons, report.figure("difference", "difference", "+.4f"))
    )
    figures = {
        "evaluation": "lm_eval",
        "tasks": tasks,
        "settings": {"num_fewshot": flags.num_fewshot, "limit": flags.limit, "seed": flags.seed, "data": data},
        "results": results,
        "comparisons": comparisons,
    }
    report.write(flags, figures, fingerprints)


def _of_file(task: str, data: Path, entry: Any, into: Path) -> tuple[str, str | None]:
    """Write a task of the harness that reads a file; return the task's own file, and a digest of what it reads."""
    shipped = getattr(entry, "yaml_path", None)
    if shipped is None or entry.kind.name != "TASK":
        raise ValueError(f"{task!r} is not one task of the harness by its name; --data has a file for each such task.")
    for kind, suffix in (("json", "jsonl"), ("parquet", "parquet")):
        if (file := data / f"{task}.{suffix}").is_file():
            splits = {"training_split": None, "validation_split": None, "fewshot_split": None, "test_split": "test"}
            read = {"dataset_path": kind, "dataset_name": None, "dataset_kwargs": {"data_files": {"test": str(file)}}}
            files.write_json(into / f"{task}.yaml", {"include": str(shipped), **read, **splits})  # JSON is YAML
            return str(into / f"{task}.yaml"), recorded.fingerprint(file)
    raise FileNotFoundError(f"there is neither {task}.jsonl nor {task}.parquet in {data}; --data names their folder.")


def compare(results: Sequence[dict[str, Any]], against: str) -> list[dict[str, Any]]:
    """Compare each model's figure of a task with those of :func:`evals.report.pairs`, on the same samples."""
    lines = [{"when": None, **r, "policy": _policy(r)} for r in results]
    found = report.compare(lines, against, lambda r: r["by_sample"], ("task", "metric"), ("budget",))
    return [{name: value for name, value in r.items() if name != "better"} for r in found]  # a metric says no such


def _policy(settings: Mapping[str, Any]) -> str:
    return str(settings["policy"]) if settings.get("select") is None else report.READS + str(settings["select"])


def lines_of(found: Any) -> list[dict[str, Any]]:
    """Return the harness's figures, one line per task and metric."""
    lines = []
    for task, figures in (found or {}).get("results", {}).items():
        samples = found.get("n-samples", {}).get(task, {}).get("effective")
        for name, value in figures.items():
            metric, _, rest = name.partition(",")
            if isinstance(value, int | float) and "_stderr" not in name and metric not in ("alias", "sample_len"):
                error = figures.get(f"{metric}_stderr,{rest}")
                error = float(error) if isinstance(error, int | float) else None
                told = {"task": task, "metric": metric, "value": float(value), "error": error, "samples": samples}
                lines.append({**told, "by_sample": _by_sample(found, task, metric, rest)})
    return lines


def _by_sample(found: Any, task: str, metric: str, chosen: str) -> list[float]:
    """Return a metric's value of each sample; none where it is one of all samples together, such as a perplexity."""
    own = [sample for sample in found.get("samples", {}).get(task, ()) if sample.get("filter", chosen) == chosen]
    values = [sample.get(metric) for sample in sorted(own, key=lambda sample: sample["doc_id"])]
    return [float(value) for value in values] if all(isinstance(value, int | float) for value in values) else []


def _table(results: Sequence[dict[str, Any]]) -> str:
    cells: list[tuple[str, report.Cell]] = [
        ("policy or selection", lambda r: r.get("select") or r["policy"]),
        ("budget", report.budget),
        ("task", "{task}"),
        ("metric", "{metric}"),
        ("value", "{value:.4f}"),
        ("std. error", lambda r: "" if r["error"] is None else f"{r['error']:.4f}"),
        ("samples", lambda r: "" if r["samples"] is None else str(r["samples"])),
    ]
    return report.table(results, cells, left=4)


def _check_answers(folder: Path, text: str, digests: Mapping[str, str]) -> None:
    """Check that a folder's answers come from the same model and tokenizer; each answer's key holds its question."""
    header = folder / "header.json"
    known = documents.read_object(header) if header.exists() else {}
    if text in known or list(folder.glob(f"{_cache_name(text)}*")):
        provenance.check_same(folder, known.get(text), digests)
    else:
        files.write_json(header, {**known, text: dict(digests)})


def _cache_name(text: str) -> str:
    return f"answers-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None
