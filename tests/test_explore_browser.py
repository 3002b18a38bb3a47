"""The explorer in a real browser: a picture is dropped, patches are clicked, and the pictures change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from attendless_lab.explore.picture import MOST_BYTES, first_picture
from explore_page import served

pytest.importorskip("gradio")
pytestmark = pytest.mark.slow
#: How long anything may take on a machine that does something else as well.
PATIENCE = 60_000
#: Notes when a click is made and when the next pictures are drawn.
STOPWATCH = """() => {
  window.watch = {begun: null, drawn: null};
  window.addEventListener('click', () => { window.watch = {begun: performance.now(), drawn: null}; }, {capture: true});
  const seen = new MutationObserver(() => requestAnimationFrame(() => { window.watch.drawn = performance.now(); }));
  for (const board of document.querySelectorAll('.board')) seen.observe(board, {childList: true, subtree: true});
}"""


@pytest.fixture(scope="module")
def address():
    with served("deit_tiny_patch16_224") as found:
        yield found


@pytest.fixture
def tab(browser, address: str):
    """The page, with its first pictures; whatever it complains of, or asks of anyone else, fails the test."""
    opened = browser.new_page(viewport={"width": 1280, "height": 1160}, color_scheme="light")
    opened.set_default_timeout(PATIENCE)
    said: list[str] = []
    opened.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: said.append(str(error)))
    ours = (address, address.replace("http", "ws"), "data:", "blob:")
    opened.on("request", lambda made: None if made.url.startswith(ours) else said.append(made.url))
    opened.goto(address)
    opened.wait_for_selector(".board table >> nth=1")
    yield opened
    opened.close()
    assert said == []


def pictures(tab) -> list[str]:
    return tab.eval_on_selector_all(".board img", "(found) => found.map((one) => one.src)")


def changed(tab, before: list[str], which: range | tuple[int, ...] = range(6)) -> list[str]:
    """The pictures, once those of `which` differ from before."""
    script = "([before, which]) => { const now = [...document.querySelectorAll('.board img')].map((one) => one.src);"
    script += " return now.length === before.length && which.every((i) => now[i] !== before[i]); }"
    tab.wait_for_function(script, arg=[before, list(which)])
    return pictures(tab)


def facts(tab) -> list[str]:
    return tab.locator(".board table").all_inner_texts()


def test_a_visit(tab, tmp_path: Path) -> None:
    now = pictures(tab)
    assert len(now) == 6
    rows = np.random.default_rng(0).integers(0, 255, (300, 400, 3), dtype=np.uint8)
    Image.fromarray(rows).resize((40, 30)).resize((400, 300)).save(tmp_path / "mine.png")
    answers = facts(tab)
    tab.set_input_files("input[type=file]", tmp_path / "mine.png")
    now = changed(tab, now)
    assert facts(tab) != answers

    tab.evaluate(STOPWATCH)
    times = []
    for across, down in ((0.3, 0.3), (0.6, 0.2), (0.5, 0.8), (0.2, 0.6), (0.9, 0.9)):
        box = tab.locator(".board img").first.bounding_box()
        tab.mouse.click(box["x"] + across * box["width"], box["y"] + down * box["height"])
        now = changed(tab, now)
        patch = f"the patch: row {int(14 * down)}, column {int(14 * across)}"
        assert tab.locator(".board figcaption").first.inner_text() == patch
        assert tab.get_by_label("patch: row").input_value() == str(int(14 * down))
        times.append(tab.evaluate("watch.drawn - watch.begun"))
    print("milliseconds from click to picture:", ", ".join(f"{time:.0f}" for time in times))
    assert min(times) < 1000  # 300 on an idle machine; see docs/seeing.md

    tab.get_by_label("number input for layer").fill("9")
    now = changed(tab, now, range(1, 6))  # all but the picture itself
    answers = facts(tab)
    tab.get_by_label("number input for keep rate").first.fill("0.5")
    now = changed(tab, now, (2, 3))  # the left model's mask and map
    assert tab.get_by_label("attention of the left model").input_value() == "foveal:keep=0.5"
    assert facts(tab)[0] != answers[0]
    assert facts(tab)[1] == answers[1]


def test_by_keyboard_alone(tab) -> None:
    now = pictures(tab)
    for _ in range(12):
        tab.keyboard.press("Tab")
        if tab.evaluate(
            "document.activeElement.classList.contains('board') || !!document.activeElement.closest('.board')"
        ):
            break
    tab.keyboard.press("ArrowUp")
    now = changed(tab, now)
    assert tab.get_by_label("patch: row").input_value() == "6"
    tab.keyboard.press("ArrowRight")
    now = changed(tab, now)
    assert tab.get_by_label("column").input_value() == "8"
    tab.get_by_label("patch: row").focus()
    tab.keyboard.press("ArrowUp")  # a step of a number
    changed(tab, now)


def test_bad_pictures_are_one_message_and_change_nothing(tab, tmp_path: Path) -> None:
    before = pictures(tab)
    (tmp_path / "text.jpg").write_text("not a picture")
    Image.new("1", (12_000, 9_000)).save(tmp_path / "bomb.png")
    for name, message in {"text.jpg": "cannot identify image file", "bomb.png": "expected at most 50 million"}.items():
        tab.set_input_files("input[type=file]", tmp_path / name)
        toast = tab.locator(".toast-body", has_text=message)
        toast.wait_for()
        assert str(tmp_path) not in toast.inner_text()
    assert pictures(tab) == before
    first_picture().convert("CMYK").save(tmp_path / "cmyk.jpg")
    tab.get_by_label("patch: row").fill("3")  # the pictures are others at another patch
    now = changed(tab, before)
    Image.new("RGB", (1, 1), "red").save(tmp_path / "pixel.png")
    tab.set_input_files("input[type=file]", tmp_path / "pixel.png")
    now = changed(tab, now, (0,))
    tab.set_input_files("input[type=file]", tmp_path / "cmyk.jpg")
    changed(tab, now, (0,))


def test_an_upload_over_the_limit_is_one_message(browser, address: str, tmp_path: Path) -> None:
    opened = browser.new_page()
    opened.goto(address)
    opened.wait_for_selector(".board table >> nth=1", timeout=PATIENCE)
    (tmp_path / "large.jpg").write_bytes(bytes(MOST_BYTES + 1))
    opened.set_input_files("input[type=file]", tmp_path / "large.jpg")
    opened.locator(".toast-body").wait_for(timeout=PATIENCE)
    (said,) = opened.locator(".toast-body").all_inner_texts()
    assert "exceed the maximum allowed size of 20.0 Mb" in said
    opened.close()
