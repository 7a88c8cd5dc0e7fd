"""A training run's folder is resumed by the same run alone."""

import pytest

from train import folder

RUN = {"seed": 0, "settings": {"batch": 4, "cache_dtype": None}}


def test_a_run_from_before_a_setting_was_there_goes_on_with_its_default(tmp_path):
    before = {"seed": 0, "settings": {"batch": 4}}
    folder.begin_run(tmp_path, before, (), resume=True, facts={})
    folder.check_run(tmp_path, RUN, (), resume=True)
    asked = RUN | {"settings": {"batch": 4, "cache_dtype": "int8"}}
    with pytest.raises(
        ValueError, match=r'another run \(settings cache_dtype null there, "int8" here\): choose another'
    ):
        folder.check_run(tmp_path, asked, (), resume=True)


def test_another_run_may_start_anew_where_one_was_recorded_but_not_where_none_was(tmp_path):
    folder.begin_run(tmp_path, RUN, (), resume=True, facts={})
    with pytest.raises(ValueError, match=r"another run \(seed 0 there, 1 here\)"):
        folder.check_run(tmp_path, RUN | {"seed": 1}, (), resume=True)
    folder.check_run(tmp_path, RUN | {"seed": 1}, (), resume=False)
    (tmp_path / "run.json").unlink()
    (tmp_path / "log.jsonl").touch()
    with pytest.raises(ValueError, match=r"holds log\.jsonl, which no run in this folder made"):
        folder.check_run(tmp_path, RUN, (), resume=False)
