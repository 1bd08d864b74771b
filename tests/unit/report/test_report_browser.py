"""The pages in a real browser: they fit, they are quiet, they can be walked by keyboard, in both schemes.

Screenshots stay in pytest's folder (``--basetemp``), or in the folder that EYAS_SCREENSHOTS names.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import chromium
import pytest

from eyas import fs
from eyas.report.compare import compare
from eyas.report.page import render
from eyas.report.sources import gather

PROGRAM = chromium.find()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium here: apt-get install chromium, or EYAS_CHROMIUM=path"
)
VIEWS = [(width, dark) for width in (360, 1600) for dark in (False, True)]
REACHABLE = "a[href], summary, [tabindex='0']"
TEXTS = """
(() => {
  const rgb = text => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = node => { for (; node; node = node.parentElement) {
    const back = rgb(getComputedStyle(node).backgroundColor); if (back.length < 4 || back[3] > 0) return back; } };
  const found = {};
  for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.getClientRects().length || ['STYLE', 'title'].includes(node.tagName)) continue;
    const inSvg = node instanceof SVGElement, style = getComputedStyle(node);
    const [a, b] = [light(rgb(inSvg ? style.fill : style.color)), light(behind(node))].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < 4.5) found[node.tagName + '.' + (node.className.baseVal ?? node.className)] = ratio;
  }
  return found;
})()
"""
"""WCAG's contrast of every text with the colour behind it; those below 4.5."""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Tab]:
    assert PROGRAM is not None
    with chromium.browser(PROGRAM, tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(kept: Path) -> dict[str, Path]:
    """Both pages, of a run whose names and texts are as awkward as data may be."""
    path = kept / "reports/acceptance.json"
    rounds = [{"accepted": " word" * (k % 4), "bonus": f" and<{k}>"} for k in range(60)]
    worst = {"source": "chatterbot", "tau": 1.1, "num_rounds": 60, "prompt": "x" * 300, "first": "A", "rounds": rounds}
    fs.write_record(path, fs.read_json(path) | {"worst": [worst, worst]})
    fs.write_record(kept / "reports/serve.json", {"tau_server": 1.79, "tau_offline": 1.8, "speedup": {"1": 1.4}})
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "-A"), (*who, "commit", "-qm", "a run <of> " + "long words " * 20)):
        subprocess.run(["git", *words], cwd=kept, check=True)
    compare(kept, "HEAD")
    index = kept / "reports/index.html"
    fs.write_text(index, render(gather(kept)))
    return {"index": index, "against": kept / "reports/against.html"}


@pytest.mark.parametrize("name", ["index", "against"])
def test_page_fits_and_is_quiet(tab: chromium.Tab, pages: dict[str, Path], name: str, tmp_path: Path) -> None:
    folder = Path(os.environ.get("EYAS_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    backgrounds = set()
    for width, dark in VIEWS:
        tab.show(pages[name], width, dark=dark)
        where = f"{name} at {width} px, {'dark' if dark else 'light'}"
        tab.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{where}: wider than the window"
        assert tab.evaluate(TEXTS) == {}, f"{where}: pale text"
        backgrounds.add(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        tab.screenshot(folder / f"{name}-{width}-{'dark' if dark else 'light'}.png")
        assert_quiet(tab, pages[name], where)
    assert len(backgrounds) == 2  # dark and light differ


def assert_quiet(tab: chromium.Tab, page: Path, where: str) -> None:
    """Nothing was fetched but the page, nothing was complained about."""
    loud = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
    assert [event for event in tab.events if event["method"] in loud] == [], where
    asked = {e["params"]["request"]["url"] for e in tab.events if e["method"] == "Network.requestWillBeSent"}
    assert asked == {page.resolve().as_uri()}, where


@pytest.mark.parametrize("name", ["index", "against"])
@pytest.mark.parametrize("width", [360, 1600])
def test_everything_is_reached_by_tab(tab: chromium.Tab, pages: dict[str, Path], name: str, width: int) -> None:
    tab.show(pages[name], width, dark=False)
    tab.evaluate(f'[...document.querySelectorAll("{REACHABLE}")].forEach((one, index) => one.dataset.index = index)')
    wanted = tab.evaluate(f'[...document.querySelectorAll("{REACHABLE}")].filter(one => one.checkVisibility()).length')
    reached: dict[str, str] = {}
    for _ in range(wanted + 4):
        tab.press_tab()
        at = tab.evaluate("document.activeElement.dataset.index ?? ''")
        if at:
            reached.setdefault(at, tab.evaluate("getComputedStyle(document.activeElement).outlineStyle"))
    assert len(reached) == wanted > 5
    assert set(reached.values()) == {"solid"}  # whoever is focused shows it
    assert list(map(int, reached)) == sorted(map(int, reached))  # in reading order


def test_boxes_that_scroll_and_drawings_have_names(tab: chromium.Tab, pages: dict[str, Path]) -> None:
    tab.show(pages["index"], 360, dark=False)
    nameless = "[...document.querySelectorAll('[role]')].filter(one => !one.getAttribute('aria-label')).length"
    assert tab.evaluate(nameless) == 0
    assert tab.evaluate("document.querySelectorAll('h1').length") == 1
    assert tab.evaluate(
        "[...document.querySelectorAll('[id]')].length === new Set([...document.querySelectorAll('[id]')].map(one => one.id)).size"
    )
    broken = "[...document.querySelectorAll('a[href^=\"#\"]')].filter(one => !document.querySelector(one.getAttribute('href'))).length"
    assert tab.evaluate(broken) == 0


def test_the_browser_itself_would_notice(tab: chromium.Tab, tmp_path: Path) -> None:
    """A page that does all of it wrong: the checks above can fail."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<!doctype html><meta name=viewport content='width=device-width'><body style='background:#fff'>"
        "<p style='color:#ccc'>pale</p><div style='width:3000px'>wide</div>"
        "<img src='http://127.0.0.1:9/x.png'><script>console.error('loud')</script>"
    )
    tab.show(page, 360, dark=False)
    assert not tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert list(tab.evaluate(TEXTS)) == ["P."]
    with pytest.raises(AssertionError):
        assert_quiet(tab, page, "bad")
    assert re.search(r"127\.0\.0\.1:9", str(tab.events))
