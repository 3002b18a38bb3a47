"""The report stands alone, draws what it was given, and works in a real browser."""

from __future__ import annotations

import base64
import itertools
import json
import re
from pathlib import Path

import pytest
import torch

from attendless.palette import COLOURS
from attendless_lab.compare.build import build
from attendless_lab.compare.patterns import looks
from attendless_lab.compare.report import page
from attendless_lab.compare.variants import MODEL, combinations

#: A picture of one pixel.
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5E"
    "rkJggg=="
)


def made_up_row(i: int, attention: str, setting: str = "one") -> dict:
    """A row with every key the page reads; the numbers are made up."""
    curve = [
        {
            "size": [32 * f, 32 * f],
            "tokens": 64 * f * f,
            "macs": {"core": 10**6 * f * i, "total": 10**7 * f * (i + 1)},
            "latency_ms": f * (1 + i / 3),
            "dense_latency_ms": 1.5 * f,
            "ms": f * (1 + i / 3),
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


#: What the demo leaves, made up.
CONVERSION = {
    "attention": "foveal:keep=0.1", "data": "scenes", "trained_at": [32, 32], "size": [192, 192], "tokens": 2304,
    "images": 600, "agreement": 0.985, "speedup": 3.2, "quartiles": [3.1, 3.3], "cap": 9.7, "latency_ms": 25.0,
    "dense_latency_ms": 80.0, "top1": 91.0, "dense_top1": 91.2, "peak_memory_mb": 20.0, "dense_peak_memory_mb": 60.0,
    "shown": [{"picture": PIXEL, "sharp": PIXEL}] * 2, "headline": "foveal: <sooner>",
}  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = ["full", "window:size=4", "axial", "bigbird", "foveal", "efficient", "linformer", "</script><b>bold"]
    rows = [made_up_row(i, name) for i, name in enumerate(names)]
    for row, variant in zip(rows, combinations([MODEL], names[:2], [None], ["scenes"], ["scenes"], {}), strict=False):
        row["looks"] = [vars(look) for look in looks(build(variant, 10), torch.zeros(3, 32, 32))]
    rows[1]["top1_mean"] = 10.0  # far below all others
    rows.append(made_up_row(1, "xca", "two") | {"failed": "the loss became nan", "top1_mean": None})
    payload = {
        "headlines": ["foveal: <sooner>", "trained alike"],
        "conversion": CONVERSION,
        "rows": rows,
        "pictures": {"one": PIXEL},
        "colours": COLOURS,
        "stamp": "a <machine>",
        "commands": ["attendless <x>"],
    }
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page(payload))
    return path


def test_a_look_is_the_layers_map() -> None:
    """Window attention's bytes are nothing outside the window, and the most is 255."""
    (variant,) = combinations([MODEL], ["window:size=4"], [None], ["scenes"], ["scenes"], {})
    model = build(variant, 10)
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
    assert opened.locator("#headlines p").all_text_contents() == ["foveal: <sooner>", "trained alike"]
    assert opened.locator("#bars rect").count() == 6
    assert opened.locator("#sharp img").count() == 4
    assert opened.locator("#time svg").count() == 1
    assert opened.locator("#tradeoffs svg").count() == 2
    assert opened.locator(".front").count() == 3
    assert opened.locator("#growth svg").count() == 3
    assert opened.locator("#curves polygon").count() == 16
    assert opened.locator("#maps figure > canvas").count() == 2
    assert opened.locator("#maps .lit canvas").count() == 2, "each map beside the picture in its light"
    charts = "[...document.querySelectorAll('#tradeoffs svg, #growth svg, #curves svg')]"
    heights = opened.evaluate(f"{charts}.map((svg) => svg.getBoundingClientRect().height)")
    assert max(heights) - min(heights) < 1, "charts are drawn for the width they have"


def test_names_of_marks_do_not_overlap(opened) -> None:
    box = "(t) => { const b = t.getBBox(); return [b.x, b.y, b.width, b.height]; }"
    of = f"(svg) => [...svg.querySelectorAll('text.name')].map({box})"
    found = opened.evaluate(f"[...document.querySelectorAll('#time svg, #tradeoffs svg')].map({of})")
    boxes = [[(x, y, x + w, y + h) for x, y, w, h in names] for names in found]
    assert len(boxes[0]) >= 6, "nearly every mark of the large chart is named"
    for names in boxes:
        for a, b in itertools.combinations(names, 2):
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_one_far_below_does_not_flatten_the_others(opened) -> None:
    lowest = "(values) => lowest(values)"
    assert opened.evaluate(lowest, [10.0, 90, 86, 94, 88]) == 86
    assert opened.evaluate(lowest, [70.0, 90, 86, 94, 80]) == 70
    assert "window 10.0 % ↓" in opened.locator("#time text.name").all_text_contents()


def test_the_table_sorts_by_number(opened) -> None:
    def column(place: int) -> list[str]:
        return opened.locator(f"#table tbody td:nth-child({place})").all_inner_texts()

    shown = [float(text.split(" ")[0]) for text in column(2)]
    assert shown == sorted(shown, reverse=True)
    heading = opened.locator("#table th").nth(2)
    heading.click()
    assert column(3) == ["4.00", "5.33", "6.67", "8.00", "9.33", "10.67", "12.00", "13.33"]
    heading.click()
    assert column(3) == ["13.33", "12.00", "10.67", "9.33", "8.00", "6.67", "5.33", "4.00"]
    assert heading.get_attribute("aria-sort") == "descending"


def test_pointing_at_a_mark_names_it(opened) -> None:
    tip = opened.locator("#tip")
    assert not tip.is_visible()
    opened.locator("#time svg .mark").first.hover()
    assert tip.inner_text().startswith("full\n90.00 %")
    opened.locator("h1").hover()
    assert not tip.is_visible()


def test_cost_at_another_size_and_another_setting(opened) -> None:
    before = opened.locator("#time .mark").first.get_attribute("aria-label")
    opened.select_option("#tokens", "0")
    after = opened.locator("#time .mark").first.get_attribute("aria-label")
    assert "1024 tokens" in before, "first where attentions differ"
    assert "64 tokens" in after
    assert opened.locator("#table tbody td:nth-child(3)", has_text="1.00").count() == 1, "and in the table"
    opened.select_option("#setting", "1")
    assert opened.locator("#table tbody tr").count() == 1
    assert "the loss became nan" in opened.locator("#notes").inner_text()


def test_the_front_is_of_those_none_beats(opened) -> None:
    found = opened.evaluate("front([[1, 5], [2, 4], [2, 7], [3, 7], [4, 9]].map(([cost, score]) => ({cost, score})))")
    assert [(p["cost"], p["score"]) for p in found] == [(1, 5), (2, 7), (4, 9)]


def test_pointing_at_a_patch_asks_from_there(opened) -> None:
    canvas = opened.locator("#maps figure > canvas").nth(1)
    pixel = "c => [...c.getContext('2d').getImageData(0, 0, 1, 1).data][3]"
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    opened.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + box["height"] * 0.9)
    assert opened.locator("#maps figure > canvas").nth(1).evaluate(pixel) == 0
    opened.mouse.move(box["x"] + box["width"] * 0.1, box["y"] + box["height"] * 0.1)
    assert opened.locator("#maps figure > canvas").nth(1).evaluate(pixel) > 0
