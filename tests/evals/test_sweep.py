"""A sweep end to end: one folder, the same records as the evaluations alone, resumable; its page in a browser."""

import itertools
import json
import re
from pathlib import Path

import pytest

from evals import evaluator, page, view
from evals.__main__ import main
from evals.results import Results, read_records
from tests.evals import browser
from tests.tiers import matrix, nightly

# Budget, block and batch are those of test_needle and test_ruler: their programs are in the cache on the disk.
SMALL = Path(__file__).with_name("small.toml").read_text()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "small.toml").write_text(SMALL)
    assert main(["sweep", str(folder / "small.toml"), "--out", str(folder / "run")]) == 0
    return folder


def test_a_sweep_whose_files_have_changed_does_not_go_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluator, "run", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)
    content = "policies = ['full']\n[tasks.ruler]\ntasks = ['niah_single_2']\nlengths = [320]\nsamples = 1\n"
    (tmp_path / "some.toml").write_text(content + "essays = 'essay.txt'")
    (tmp_path / "essay.txt").write_text("One. Two. " * 99)
    main(["sweep", "some.toml", "--out", "run"])
    (tmp_path / "essay.txt").write_text("One. Three. " * 99)
    assert main(["sweep", "some.toml", "--out", "run"]) == 2
    assert "essay" in (said := capsys.readouterr().err) and " was " in said


@matrix
def test_what_fails_is_named_and_the_rest_is_done(tmp_path, capsys, monkeypatch):
    run = evaluator.run

    def fail(model, tokenizer, groups, *rest, **options):
        if groups[0].task == "niah_single_1":
            raise ValueError("the task takes a rest.")
        run(model, tokenizer, groups, *rest, **options)

    monkeypatch.setattr(evaluator, "run", fail)
    content = "policies = ['full']\n[tasks.ruler]\ntasks = ['fwe', 'niah_single_1']\nlengths = [320]\nsamples = 1"
    (tmp_path / "some.toml").write_text(content)
    assert main(["sweep", str(tmp_path / "some.toml"), "--out", str(tmp_path / "run")]) == 2
    assert (
        "1 of the sweep's groups failed, the others are done: retriever, niah_single_1 at 320: the task takes a rest"
        in capsys.readouterr().err
    )
    assert [r["task"] for r in read_records(tmp_path / "run")] == ["fwe"]


@pytest.fixture(scope="module")
def written(finished):
    path = finished / "page.html"
    assert main(["report", str(finished / "run"), "--html", str(path)]) == 0
    return path


@nightly  # a whole sweep; its parts are the evaluations themselves
@browser.needed
def test_the_page_shows_every_row_and_panel_needs_nothing_else_and_fits_a_phone(written):
    outside = set(re.findall(r"https?://[^\s\"'<]+", written.read_text())) - {"http://www.w3.org/2000/svg"}
    assert not outside and "<link" not in written.read_text() and "src=" not in written.read_text()
    script = "document.title = document.documentElement.scrollWidth <= window.innerWidth ? 'fits' : 'too wide';"
    found = browser.dump(written, script=script)
    body = found.split('<tbody id="body">')[1].split("</tbody>")[0]
    assert body.count("<tr") == 4, "the needle's rows first"
    assert 'aria-sort="descending"' in found and "<title>fits</title>" in found
    assert found.count('class="point"') == 2 * 4 and "tova+caote" in body  # too few batches for a time


@nightly  # a whole sweep; its parts are the evaluations themselves
@browser.needed
def test_sorting_choosing_and_filtering_work(written):
    script = """
      document.querySelectorAll("#head button")[1].click();
      document.querySelectorAll("#body tr")[0].click();
      const select = document.getElementById("choose-evaluation");
      select.value = "ruler"; select.dispatchEvent(new Event("change"));
    """
    found = browser.dump(written, script=script)
    assert re.search(r'aria-sort="\w+"[^>]*>\s*<button type="button">budget', found)
    assert "python -m evals needle" in found.split('id="detail"')[1].split("</div>")[0]
    assert found.count("<figcaption>") == 1 + 2 and "niah_multikey_2" in found


@browser.needed
@pytest.mark.parametrize("batches", [2, 3])
def test_the_page_draws_times_with_intervals_or_not_at_all_and_cuts_no_marker(tmp_path, batches):
    with Results(tmp_path / "run", "ruler", {}, "python -m evals ruler --lengths 64") as store:
        for (policy, score), sample in itertools.product([("full", 1.0), ("tova+caote@adakv", 0.0)], range(batches)):
            store.add([
                {"model": "retriever", "evaluation": "ruler", "task": "vt", "length": 64, "policy": policy,
                 "budget": None if policy == "full" else 8, "when": "prompt", "question": "known", "sample": sample,
                 "score": score, "cache_bytes": 64 if policy == "full" else 8, "peak_cache_bytes": 64,
                 "prefill": [8, 1.0], "decode": [4, 1.0 + sample]},
            ])  # fmt: skip
    assert main(["report", str(tmp_path / "run"), "--html", str(tmp_path / "page.html")]) == 0
    script = """
      const inside = mark => {
        const own = mark.getBoundingClientRect(), all = mark.ownerSVGElement.getBoundingClientRect();
        return own.left > all.left && own.right < all.right && own.top > all.top && own.bottom < all.bottom;
      };
      document.title = [...document.querySelectorAll(".point, #key circle, #key rect")].every(inside) ? "whole" : "cut";
    """
    found = browser.dump(tmp_path / "page.html", script=script)
    assert "<title>whole</title>" in found and found.count('class="note"') == 1
    assert ("Score against decode time" in found.split("<script")[0]) == (batches == 3)


def test_a_name_cannot_end_the_script(tmp_path):
    (tmp_path / "t.html").write_text("<title>{{title}}</title>{{data}}")
    text = page.render(tmp_path / "t.html", "<b>", {"x": "</script><script>alert(1)</script>"})
    assert "</script>" not in text and "&lt;b&gt;" in text


@pytest.mark.parametrize("title", ["ruler: my-DATA", "TITLE DATA", "{{data}} of {{title}}"])
@pytest.mark.parametrize("template", [page.TEMPLATE, view.TEMPLATE])
def test_a_title_is_no_place_for_data(template, title):
    text = page.render(template, title, {"x": title})
    assert f"<title>{title}</title>" in text
    data = text.split('<script id="data" type="application/json">')[1].split("</script>")[0]
    assert json.loads(data) == {"x": title}
