"""What cannot be asked for ends in one sentence, with exit code 2, and nothing is written."""

import shlex

import pytest

from evals.__main__ import main

BAD = {
    "choices": [
        ("--model TINY --tasks golf", "unknown --tasks 'golf'; expected one of all, continuation, section, recall"),
        ("--model TINY --samples 0", "--samples is 0"),
        ("--model TINY --lengths 0", "the length '0' is not a number of tokens"),
        ("--model TINY --lengths 20", "no continuation of 20 tokens was found in the text"),
        ("--model TINY --evict-every 4", "choices generate none; leave it out"),
        ("--model TINY --question before", "unknown --question 'before'; expected one of after, agnostic"),
        ("--model TINY --text nowhere.txt", "there is no text file nowhere.txt"),
        ("--model TINY --text python-doc", "python-doc is not here yet"),
        ("--model TINY --policies h2o --budgets 0", "the budget is 0"),
        ("--model TINY --plot out.bmp", "suffix '.bmp'"),
        ("--model TINY --json nowhere/out.json", "the folder nowhere does not exist"),
    ],
    "coref": [
        ("--mode generate --when never", "unknown --when 'never'; expected one of block, prompt, published"),
        ("--mode generate --select h2o --evict-every -1", "evict_every is -1"),
        ("--when prompt", "add --mode generate, or leave them out"),
        ("--evict-every 0", "add --mode generate, or leave them out"),
        ("--select full,nothing", "unknown policy 'nothing'"),
        ("--mode guess", "unknown --mode 'guess'; expected one of teacher, generate"),
        ("--mode generate --select oracle_eviction", "'oracle_eviction' can only be simulated"),
        ('--mode generate --select "rolling_snapkv(window=8)"', "can only be simulated"),
        ("--sparsity 1.5", "the sparsity '1.5' is not the share"),
        ("--samples 0", "--samples is 0"),
        ("--seed -1", "--seed is -1"),
        ("--plot out.bmp", "suffix '.bmp'"),
        ("--butler nowhere --select butler", "nowhere has no butler.json"),
        ("--model nowhere", "there is no folder nowhere"),
    ],
    "fidelity": [
        ("--policies h2o,nothing", "unknown policy 'nothing'"),
        ("--policies h2o@nobody", "unknown allocation 'nobody'"),
        ("--budgets lots", "expected tokens per head"),
        ("--samples 0", "--samples is 0"),
        ("--when never", "unknown --when 'never'"),
        ("--question beside", "unknown --question 'beside'"),
        ("--heads heads.txt", "suffix '.txt'"),
        ("--plot nowhere/out.png", "the folder nowhere does not exist"),
        ("--model nowhere", "there is no folder nowhere"),
    ],
    "needle": [
        ("--policies h2o,nothing", "unknown policy 'nothing'"),
        ("--policies ,", "no policy was given"),
        ('--budgets ""', "no budget was given"),
        ("--budgets lots", "expected tokens per head"),
        ("--policies snapkv --budgets 16", "always keeps"),
        ("--when never", "unknown --when 'never'"),
        ("--question beside", "unknown --question 'beside'; expected one of after, before, both, agnostic"),
        ("--lengths long", "the length 'long'"),
        ("--lengths 16", "more than the length 16"),
        ("--depths 0", "at least 1 of each"),
        ("--block 0", "--block is 0"),
        ("--batch 0", "--batch is 0"),
        ("--model nowhere", "there is no folder nowhere"),
        ("--plot picture.txt", "suffix '.txt'"),
        ("--json nowhere/out.json", "the folder nowhere does not exist"),
    ],
    "perplexity": [
        ("--policies nothing", "unknown policy 'nothing'"),
        ("--policies ,", "no policy was given"),
        ("--policies h2o --budgets lots", "the budget is 'lots'"),
        ("--policies h2o --budgets ,", "no budget was given"),
        ('--policies "snapkv(window=32)" --budgets 8', "budget"),
        ("--policies h2o --block 0", "--block is 0"),
        ("--policies h2o --when never", "unknown --when 'never'; expected one of block, prompt, published"),
        ("--policies h2o --when prompt", "give --stride"),
        ("--policies random --when published", "no paper says when 'random' evicts"),
        ("--text debian-handbook", "debian-handbook is not here yet"),
        ("--select oracle,nothing", "unknown policy 'nothing'"),
        ("--select ,", "no selection was given"),
        ("--select laprox@model", "lets layers compete"),
        ("--sparsity 1", "the sparsity '1' is not the share"),
        ("--sparsity 0,...,0.7", "'...' follows two different numbers"),
        ("--batch 0", "--batch is 0"),
        ("--sinks -1", "--sinks is -1"),
        ("--text nowhere.txt", "there is no text file nowhere.txt"),
        ("--plot out.txt", "suffix '.txt'"),
        ("--json nowhere/out.json", "the folder nowhere does not exist"),
        ("--model nowhere --select h2o", "there is no folder nowhere"),
    ],
    "ruler": [
        ("--tasks needles", "unknown --tasks 'needles'; expected one of all, niah_single_1"),
        ("--tasks qa_1", "qa_1: no file of questions and documents was named"),
        ("--lengths 128", "give a greater length"),
        ("--samples 0", "--samples is 0"),
        ("--essays nowhere.txt", "there is no essays file nowhere.txt"),
        ("--qa nowhere.json", "there is no QA file nowhere.json"),
        ("--prompts nowhere.json", "there is no prompts file nowhere.json"),
        ("--question before", "unknown --question 'before'; expected one of after, agnostic"),
        ("--allocations everything", "unknown allocation 'everything'"),
        ("--plot picture.txt", "suffix '.txt'"),
        ("--batch 0", "--batch is 0"),
    ],
    "view": [
        ("--html view.html --policies ,", "no policy was given"),
        ("--html view.html --policies nothing", "unknown policy 'nothing'"),
        ("--html view.html --budget lots", "expected tokens per head"),
        ("--html view.html --policies snapkv --budget 8", "always keeps"),
        ("--html view.html --prompt-file nowhere.txt", "there is no prompt file nowhere.txt"),
        ("--html view.html --block 0", "--block is 0"),
        ("--html view.html --model nowhere", "there is no folder nowhere"),
    ],
    "ablation": [
        ("nothing", "unknown study 'nothing'; expected one of block-size"),
        ("rounds --length 0", "--length is 0"),
        ("rounds --batch 0", "--batch is 0"),
        ("rounds --depths 0", "at least 1 of each"),
        ("laprox --length 100", "always keeps"),
        ("rounds --resume", "give --json"),
        ("rounds --plot picture.txt", "suffix '.txt'"),
        ("rounds --json nowhere/out.json", "the folder nowhere does not exist"),
        ("rounds --model nowhere", "there is no folder nowhere"),
        ("claims --results nowhere", "there is no folder nowhere"),
        ("claims --results .", "no file in . holds claims"),
    ],
    "butler": [
        ("accuracy --select h2o", "'h2o' is not a source of importance"),
        ("layers --sparsity 2", "the sparsity '2' is not the share"),
        ("agreement --select oracle", "leave --select and --sparsity out"),
        ("oracles --sparsity 0,0.1,...,0.75", "0.75 is not reached from 0.1 by 0.1"),
        ("accuracy --plot nowhere/out.png", "the folder nowhere does not exist"),
        ("accuracy --model nowhere", "there is no folder nowhere"),
        ("agreement --text nowhere.txt", "there is no text file nowhere.txt"),
    ],
    "lm_eval": [
        ("--tasks piqa --model_args policy", "'policy' in the model's arguments is not name=value"),
        ("--tasks piqa --model_args policy=tova", "needs a budget"),
        ("--tasks piqa --model_args block=32 --limit 0", "--limit is 0"),
        ("--tasks piqa --model_args block=32 --include_path nowhere", "there is no folder nowhere"),
        ("--tasks piqa --model_args block=32 --json nowhere/x.json", "the folder nowhere does not"),
    ],
}


@pytest.mark.parametrize(
    ("command", "flags", "sentence"), [(command, *row) for command, rows in BAD.items() for row in rows]
)
def test_bad_flags_end_in_one_sentence_and_write_nothing(
    command, flags, sentence, tiny_folder, tmp_path, monkeypatch, capsys
):
    if command == "lm_eval":
        pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "nowhere")
    assert main([command, *shlex.split(flags.replace("TINY", str(tiny_folder)))]) == 2
    err = capsys.readouterr().err
    assert sentence in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
