"""The documentation as Chromium shows it, on a screen and on a phone: nothing is wider than the page."""

import html
import json
import subprocess
import sys
from pathlib import Path

from kvjax._src.chains import LINKS
from tests.evals import browser
from tests.tiers import nightly

ROOT = Path(__file__).parents[1]
SCREEN, PHONE = 1280, 390
# Each page in a frame of that width: what is wider than the frame, and what scrolls sideways in a box of its own.
LOOK = Path(__file__).with_name("look.js").read_text()


def looked_at(folder: Path) -> list[dict]:
    """Return what Chromium finds on every page of a folder but those of source code."""
    pages = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*.html"))]
    pages = [page for page in pages if not page.startswith(("_", "genindex", "search", "py-modindex"))]
    script = f"const PAGES = {json.dumps(pages)}, WIDTHS = [{SCREEN}, {PHONE}];{LOOK}"
    frame = folder / "_looked_at.html"
    frame.write_text(f"<!doctype html><body><script>{script}</script></body>")
    dom = browser.dump(frame, width=1400, more=("--allow-file-access-from-files", "--virtual-time-budget=900000"))
    frame.unlink()
    return json.loads(html.unescape(dom.split('id="found">')[1].split("</pre>")[0]))


@nightly  # builds the documentation, two minutes, and needs a browser
@browser.needed
def test_no_page_is_wider_than_a_screen_or_a_phone(tmp_path):
    built = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-d", str(tmp_path / "trees"), "docs"]
    subprocess.run([*built, str(tmp_path / "html")], cwd=ROOT, check=True, capture_output=True)
    shown = "".join(page.read_text() for page in (tmp_path / "html/reference/kvjax").glob("*.html"))
    assert [name for name in LINKS if f'id="kvjax.{name}"' not in shown] == []
    found = looked_at(tmp_path / "html")
    assert len(found) > 100
    assert {f"{page['page']} at {page['width']}": page["wide"] for page in found if page["wide"] > 0} == {}
    # On a phone a code block or a table scrolls inside its own box; on a screen nothing does.
    assert {page["page"]: page["scrolls"] for page in found if page["width"] == SCREEN and page["scrolls"]} == {}
