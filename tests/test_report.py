"""The report stands alone, draws what it was given, and works in a real browser."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest
import torch

from attendless.compare.build import build
from attendless.compare.contestants import MODEL, combinations
from attendless.compare.patterns import looks
from attendless.compare.report import page
from attendless.palette import COLOURS


def made_up_row(i: int, attention: str, setting: str = "one") -> dict:
    """A row with every key the page reads; the numbers are made up."""
    curve = [
        {
            "size": [32 * f, 32 * f],
            "tokens": 64 * f * f,
            "macs": {"core": 10**6 * f * i, "total": 10**7 * f * (i + 1)},
            "latency_ms": f * (1 + i / 3),
            "dense_latency_ms": 1.5 * f,
            "speedup": 1.5 / (1 + i / 3),
            "peak_memory_mb": 3.0 + i * f,
        }
        for f in (1, 2, 4)
    ]
    return {
        **curve[0], "ms": 1 + i / 3, "attention": attention, "model": "m", "data": "d", "recipe": "r", "patch": None,
        "setting": setting, "params": 10**5 + i, "throughput": 100.0 / (i + 1), "top1_mean": 90.0 - 2 * i * (-1) ** i,
        "top1_std": 0.4, "seeds": [0, 1], "failed": None, "notes": [], "curve": curve, "runs": [],
        "curves": [[{"epoch": e, "top1": 50 + 10 * e + s, "val_loss": 2 / e} for e in (1, 2, 3)] for s in (0, 1)],
        "looks": [],
    }  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = ["full", "window:size=4", "axial", "bigbird", "foveal", "efficient", "linformer", "</script><b>bold"]
    rows = [made_up_row(i, name) for i, name in enumerate(names)]
    for row, contestant in zip(
        rows, combinations([MODEL], names[:2], [None], ["scenes"], ["scenes"], {}), strict=False
    ):
        row["looks"] = [vars(look) for look in looks(build(contestant, 10), torch.zeros(3, 32, 32))]
    rows.append(made_up_row(1, "xca", "two") | {"failed": "the loss became nan", "top1_mean": None})
    payload = {"rows": rows, "pictures": {}, "colours": COLOURS, "stamp": "a <machine>", "commands": ["attendless <x>"]}
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page(payload))
    return path


def test_a_look_is_the_layers_map() -> None:
    """Window attention's bytes are nothing outside the window, and the most is 255."""
    (contestant,) = combinations([MODEL], ["window:size=4"], [None], ["scenes"], ["scenes"], {})
    model = build(contestant, 10)
    found = looks(model, torch.randn(3, 32, 32))
    assert [look.layer for look in found] == [0, 1, 2]
    levels = torch.frombuffer(bytearray(base64.b64decode(found[1].bytes)), dtype=torch.uint8)
    levels = levels.reshape(8, 8, 8, 8)  # query row, query column, key row, key column
    assert levels[1, 2, :4, :4].min() > 0
    assert levels[1, 2].max() == 255
    assert levels[1, 2].sum() == levels[1, 2, :4, :4].sum()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_page_fetches_nothing_and_escapes_its_data(report: Path) -> None:
    text = report.read_text()
    assert not re.search(r"""(src|href)=["'](?!data:)|@import|url\(|fetch\(|XMLHttpRequest""", text)
    assert "{{" not in text.replace("`${", "")
    assert "</script><b>" not in text
    assert "attendless &lt;x&gt;" in text
    found = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert found["rows"][7]["attention"] == "</script><b>bold"


@pytest.fixture(params=[(1280, 800, "light"), (390, 844, "dark")], ids=["laptop", "phone"])
def opened(browser, report: Path, request):
    """The page in a browser; whatever it complains of fails the test."""
    width, height, scheme = request.param
    tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    said: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda made: said.append(made.url) if made.url.startswith("http") else None)
    tab.goto(report.as_uri())
    yield tab
    tab.close()
    assert said == []


def test_it_fits_its_window_and_shows_everything(opened) -> None:
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert opened.locator("#table tbody tr").count() == 8
    assert opened.locator("#tradeoffs svg").count() == 3
    assert opened.locator("#tradeoffs .front").count() == 3
    assert opened.locator("#growth svg").count() == 3
    assert opened.locator("#curves polygon").count() == 16
    assert opened.locator("#maps canvas").count() == 2
    heights = opened.evaluate("[...document.querySelectorAll('.row svg')].map((s) => s.getBoundingClientRect().height)")
    assert max(heights) - min(heights) < 1, "charts are drawn for the width they have"


def test_the_table_sorts_by_number(opened) -> None:
    def column(place: int) -> list[str]:
        return opened.locator(f"#table tbody td:nth-child({place})").all_inner_texts()

    shown = [float(text.split(" ")[0]) for text in column(2)]
    assert shown == sorted(shown, reverse=True)
    heading = opened.locator("#table th", has_text="images/s")
    heading.click()
    assert column(9) == ["100", "50", "33", "25", "20", "17", "14", "13"]
    heading.click()
    assert column(9) == ["13", "14", "17", "20", "25", "33", "50", "100"]
    assert heading.get_attribute("aria-sort") == "ascending"


def test_pointing_at_a_mark_names_it(opened) -> None:
    tip = opened.locator("#tip")
    assert not tip.is_visible()
    opened.locator("#tradeoffs svg .mark").first.hover()
    assert tip.inner_text().startswith("full\n90.00 %")
    opened.locator("h1").hover()
    assert not tip.is_visible()


def test_cost_at_another_size_and_another_setting(opened) -> None:
    before = opened.locator("#tradeoffs .mark").first.get_attribute("aria-label")
    opened.select_option("#tokens", "2")
    after = opened.locator("#tradeoffs .mark").first.get_attribute("aria-label")
    assert "64 tokens" in before
    assert "1024 tokens" in after
    opened.select_option("#setting", "1")
    assert opened.locator("#table tbody tr").count() == 1
    assert "the loss became nan" in opened.locator("#notes").inner_text()


def test_the_front_is_of_those_none_beats(opened) -> None:
    found = opened.evaluate("front([[1, 5], [2, 4], [2, 7], [3, 7], [4, 9]].map(([cost, score]) => ({cost, score})))")
    assert [(p["cost"], p["score"]) for p in found] == [(1, 5), (2, 7), (4, 9)]


def test_pointing_at_a_patch_asks_from_there(opened) -> None:
    canvas = opened.locator("#maps canvas").nth(1)
    pixel = "c => [...c.getContext('2d').getImageData(0, 0, 1, 1).data][3]"
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    opened.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + box["height"] * 0.9)
    assert opened.locator("#maps canvas").nth(1).evaluate(pixel) == 0
    opened.mouse.move(box["x"] + box["width"] * 0.1, box["y"] + box["height"] * 0.1)
    assert opened.locator("#maps canvas").nth(1).evaluate(pixel) > 0
