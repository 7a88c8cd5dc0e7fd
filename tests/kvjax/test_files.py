"""Files that are written whole: permissions, names of temporary ones, and those that nobody writes any more."""

import os
import re
import signal
import subprocess
import sys

import pytest

from kvjax._src.files import locked, replacing


@pytest.mark.parametrize("name", ["model.safetensors", "figures.json", "samples.npz", "README", "x" * 240 + ".jsonl"])
def test_a_temporary_name_is_hidden_and_ends_as_the_file_s(tmp_path, name):
    target = tmp_path / name
    with replacing(target) as temporary:
        assert temporary.parent == tmp_path and temporary.name.startswith(".")
        assert temporary.name.endswith(target.suffix)
        temporary.write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_a_killed_writer_left_is_deleted_by_the_next_one_and_nothing_else(tmp_path):
    target = tmp_path / "note.txt"
    with replacing(target) as alive:
        alive.write_text("first")
        left = alive.with_name(re.sub("-.{8}", "-deadbeef", alive.name))  # no process has its lock
        other = alive.with_name(left.name.replace("note", "notes"))
        own = alive.with_name(".note.20240101.txt")
        for path in (left, other, own):
            path.write_text("half")
        with replacing(target) as second:
            second.write_text("second")
        assert target.read_text() == "second"
        assert sorted(tmp_path.iterdir()) == sorted([alive, other, own, target])
    assert target.read_text() == "first"


def test_a_process_that_is_killed_gives_its_lock_back(tmp_path):
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'wb'); fcntl.flock(f, 2); print(flush=True); time.sleep(60)"
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "x")], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    with open(tmp_path / "x", "rb") as file:
        assert locked(file) is False
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    with open(tmp_path / "x", "rb") as file:
        assert locked(file) is True


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_a_new_file_has_the_permissions_that_the_process_gives_new_files(umask, mode, tmp_path):
    """Those of the temporary file would hide it from everybody else, such as the group that shares the results."""
    before = os.umask(umask)
    try:
        with replacing(tmp_path / "new.json") as temporary:
            temporary.write_text("{}")
        assert os.umask(umask) == umask  # as it was
    finally:
        os.umask(before)
    assert (tmp_path / "new.json").stat().st_mode & 0o777 == mode


def test_a_name_without_a_folder_or_of_one_is_refused_before_anything_is_written(tmp_path):
    for path, error in ((tmp_path / "none" / "x", FileNotFoundError), (tmp_path, ValueError)):
        with pytest.raises(error, match="cannot write"), replacing(path):
            raise AssertionError("nothing is to be written")
