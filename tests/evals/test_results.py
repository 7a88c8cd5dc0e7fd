"""A folder of results: what was answered is kept, what was cut off is dropped, other settings are refused."""

import json

import pytest

from evals import results
from evals.results import Results
from models import files


def record(sample, **more):
    return {"task": "vt", "sample": sample, "score": 0.5, **more}


def store(folder, settings=None, evaluation="ruler"):
    return Results(folder, evaluation, {"seed": 0} if settings is None else settings, "python -m evals ruler")


def test_what_was_added_is_there_when_the_folder_is_opened_again(tmp_path):
    with store(tmp_path / "run") as first:
        first.add([record(0), record(1)])
        first.add([record(1), record(2, policy="full")])
    with store(tmp_path / "run") as second:
        assert [r["sample"] for r in second.records] == [0, 1, 2]
        assert second.holds({"task": "vt", "sample": 2, "policy": "full"})
        assert not second.holds({"task": "vt", "sample": 2})
    assert results.read_records(tmp_path / "run") == second.records


@pytest.mark.parametrize("line", ["not JSON", "[]", '{"task": "vt"}', "7"])
def test_a_damaged_line_is_named_and_nothing_is_lost(tmp_path, line):
    with store(tmp_path) as first:
        first.add([record(0)])
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write(f"{line}\n{json.dumps(record(1))}\n")
    before = (tmp_path / "samples.jsonl").read_bytes()
    with pytest.raises(ValueError, match="damaged at line 2"), store(tmp_path):
        pass
    assert (tmp_path / "samples.jsonl").read_bytes() == before


def test_other_settings_are_refused_and_what_differs_is_listed(tmp_path):
    with store(tmp_path, {"seed": 0, "model": "a", "tasks": ("vt",)}):
        pass
    store(tmp_path, {"seed": 0, "model": "a", "tasks": ("vt",), "batch": 4, "against": "h2o"}).check()  # which are free
    with pytest.raises(ValueError, match="model was 'a' and is 'b'; seed was 0 and is None"):
        store(tmp_path, {"model": "b", "tasks": ("vt",)}).check()
    with pytest.raises(ValueError, match="holds results of 'ruler', not of 'longbench'"):
        store(tmp_path, evaluation="longbench").check()


def test_the_models_and_policies_of_a_run_may_grow(tmp_path):
    with store(tmp_path, {"seed": 0, "models": ["a"], "policies": ["full", "tova"], "allocations": []}) as first:
        first.add([record(0, model="a")])
    more = {"seed": 0, "models": ["a", "b"], "policies": ["full", "h2o", "tova"], "allocations": ["layer"]}
    with store(tmp_path, more) as second:
        assert len(second.records) == 1
    assert results.read_header(tmp_path)["settings"] == more
    with pytest.raises(ValueError, match=r"models was \['a', 'b'\] and is \['b'\]"):
        store(tmp_path, more | {"models": ["b"]}).check()
    with pytest.raises(ValueError, match="tasks was None"):
        store(tmp_path, more | {"tasks": ["vt"]}).check()


@pytest.mark.parametrize("more", [8, None])
def test_a_run_of_the_first_samples_may_go_on_to_more(tmp_path, more):
    with store(tmp_path, {"seed": 0, "first": 4}):
        pass
    with pytest.raises(ValueError, match="first was 4 and is 2"):
        store(tmp_path, {"seed": 0, "first": 2}).check()
    grown = {"seed": 0} | ({} if more is None else {"first": more})
    with store(tmp_path, grown):
        pass
    assert results.read_header(tmp_path)["settings"] == grown


def test_a_run_that_was_killed_before_its_first_sample_goes_on(tmp_path):
    (tmp_path / ".header.xyz.json").write_text("{")  # what is left of a file that was being written
    with store(tmp_path):
        pass
    (tmp_path / "samples.jsonl").unlink()
    with store(tmp_path) as second:
        assert second.records == []


def test_two_runs_never_write_into_one_folder(tmp_path):
    with store(tmp_path), pytest.raises(ValueError, match="another run writes into"), store(tmp_path):
        pass


def test_a_run_that_ends_while_another_waits_for_its_lock_loses_nothing(tmp_path, monkeypatch):
    first, lock = store(tmp_path), files.lock

    def late(file, folder):
        first.check_digests({"model": "m"}, {"weights": "1"})
        first.__exit__(None, None, None)
        lock(file, folder)

    with first:
        monkeypatch.setattr(files, "lock", late)
        with store(tmp_path) as second:
            assert second.fingerprints == [{"labels": {"model": "m"}, "made of": {"weights": "1"}}]
    assert results.read_header(tmp_path)["fingerprints"] == second.fingerprints


def test_records_of_other_weights_are_refused(tmp_path):
    about, digests = {"model": "m"}, {"weights": "1", "prose": "2"}
    with store(tmp_path) as first:
        first.check_digests(about, digests)
        first.add([record(0, model="m")])
    with store(tmp_path) as second:
        second.check_digests(about, digests)
        second.check_digests({"model": "another"}, {"weights": "3"})
        with pytest.raises(ValueError, match=r"different weights \('1', now '2'\)"):
            second.check_digests(about, {"weights": "2", "prose": "2"})
        with pytest.raises(ValueError, match=r"different gate \(none, now '4'\)"):
            second.check_digests(about, digests | {"gate": "4"})
        second.check_digests(about, digests | {"gate": "4"}, ["gate"])  # of a policy that was added
        with pytest.raises(ValueError, match=r"different gate \('4', now '5'\)"):
            second.check_digests(about, digests | {"gate": "5"}, ["gate"])
    assert [known["labels"]["model"] for known in results.read_header(tmp_path)["fingerprints"]] == ["m", "another"]


def test_records_that_do_not_say_what_they_are_made_of_are_refused(tmp_path):
    with store(tmp_path) as first:
        first.add([record(0, model="m")])
    with store(tmp_path) as second, pytest.raises(ValueError, match="does not say what weights"):
        second.check_digests({"model": "m"}, {"weights": "1"})


def test_a_fingerprint_follows_the_content(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("one")
    first = results.fingerprint(tmp_path), results.fingerprint(file)
    file.write_text("two")
    second = results.fingerprint(tmp_path), results.fingerprint(file)
    assert len({*first, *second}) == 4
    assert results.fingerprint(tmp_path / "none") is None


def test_machines_that_made_records_are_noted_and_no_others(tmp_path, monkeypatch):
    for device, sample in (("one", 0), ("two", 1), ("three", 1)):
        monkeypatch.setattr(results.provenance, "environment", lambda device=device: {"device": device})
        with store(tmp_path / "run") as one:
            one.add([record(sample)])
    assert one.environments == [{"device": "one"}, {"device": "two"}]
    assert results.read_header(tmp_path / "run")["environments"] == one.environments
