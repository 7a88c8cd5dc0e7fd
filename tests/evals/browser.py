"""A page as headless Chromium shows it; tests that need one are skipped where there is none."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
needed = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync"
)


def dump(html: Path, *, script: str = "", width: int = 390, height: int = 844, more: Sequence[str] = ()) -> str:
    """The page's DOM after its own script, and then another, ran on a screen as small as a phone's."""
    assert CHROMIUM is not None
    if script:
        changed = html.with_name("changed.html")
        changed.write_text(html.read_text().replace("</body>", f"<script>{script}</script></body>"))
        html = changed
    size = f"--window-size={width},{height}"
    profile = f"--user-data-dir={html.parent}/profile"
    command = [CHROMIUM, *FLAGS.split(), *more, size, profile, "--dump-dom", html.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
