"""Published studies: the file is what the recorded command makes of the study's TOML file, and nothing else."""

import json
import shlex

import pytest

from docs import tables
from evals import command_line, studies, sweep
from papers import remake


def planned(content):
    """Count the samples of each task that a sweep answers, by model, length, policy, budget, moment and question."""
    found = {}
    for part in sweep.plan(content):
        flags, options = part.flags, content["tasks"][part.flags.name]
        each = flags.depths * flags.asked if flags.name == "needle" else 1
        each = flags.facts + 1 if flags.name == "questions" else each
        count = flags.samples * each
        tasks = dict.fromkeys(options.get("tasks", [flags.name]), min(count, flags.first or count))
        for setting in part.settings:
            told = setting.fields()
            place = tuple(told[name] for name in ("policy", "budget", "when", "question"))
            found |= {(flags.model, length, *place): tasks for length in command_line.check_sizes(flags)}
    return found


@pytest.mark.parametrize("name", tables.STUDIES)
def test_a_published_study_is_what_its_command_makes(name):
    read, data = studies.find(name), tables.read(f"{name}.json")
    place = f"docs/results/{name}.json"
    made = remake.arguments(place, remake.read()[place])
    assert sorted(shlex.split(data["command"])) == sorted(["python", *made])  # in any order
    assert data["settings"] == json.loads(json.dumps(read.content))
    wanted = {}
    for place, tasks in (item for content in read.sweeps for item in planned(content).items()):
        there = wanted.setdefault(place, {})  # the newest tokens run in each sweep
        there |= {task: max(count, there.get(task, 0)) for task, count in tasks.items()}
    fields = ("model", "length", "policy", "budget", "when", "question")
    published = {
        tuple(line[field] for field in fields): {task: len(scores) for task, scores in line["scores"].items()}
        for line in data["results"]
    }
    assert published == wanted
    answered = [score for line in data["results"] for scores in line["scores"].values() for score in scores]
    assert not {"-", None}.intersection(answered)
