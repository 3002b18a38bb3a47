"""The explorer: what is drawn is what the model looks at, a click computes one patch's rows, visitors break nothing."""

from __future__ import annotations

import base64
import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

from attendless import UserError, convert
from attendless.data.source import BadImage
from attendless.maps import maps
from attendless.measure.accuracy import preprocessing
from attendless.measure.macs import count
from attendless_lab.explore import board, paint
from attendless_lab.explore.picture import (
    MOST_BYTES,
    MOST_PIXELS,
    Picture,
    first_picture,
    prepare,
    take,
)
from attendless_lab.explore.sides import (
    DENSE,
    OWN,
    Explorer,
    keep_of,
    with_keep,
)
from explore_page import served

pytest.importorskip("matplotlib")
httpx = pytest.importorskip("httpx")
SPARSE = "foveal:keep=0.3,cell=2,tile=1"


def vit() -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5).eval()


@pytest.fixture(scope="module")
def transform():
    return preprocessing(vit(), (32, 32))


@pytest.fixture(scope="module")
def seen(transform) -> Picture:
    colours = np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)
    return prepare(Image.fromarray(colours), transform)


@pytest.fixture
def explorer() -> Explorer:
    return Explorer(vit())


@pytest.mark.parametrize("attention", [DENSE, "full", OWN, SPARSE])
@pytest.mark.parametrize("head", [None, 1])
def test_a_look_is_a_row_of_the_map_used(explorer: Explorer, seen: Picture, attention: str, head: int | None) -> None:
    model = convert(vit(), SPARSE if attention == SPARSE else "full", below_breakeven="keep")
    look = explorer.look(attention, seen, (2, 3), 1, head)
    (found,) = maps(model, seen.image, 1)
    patch = 1 + 2 * 4 + 3
    expected = found.weights[0, :, patch, 1:].unflatten(-1, (4, 4))
    expected = expected.mean(0) if head is None else expected[head]
    torch.testing.assert_close(look.weights, expected, atol=1e-6, rtol=0)
    assert (look.row, look.column) == (2, 3)
    assert bool((look.sharp == 1).all()) == (attention != SPARSE)
    with pytest.raises(UserError, match="there is no patch in row 4, column 0: the last is in row 3, column 3"):
        explorer.look(attention, seen, (4, 0), 1)
    with pytest.raises(UserError, match="layer 1 has no head 2: it has heads 0 to 1"):
        explorer.look(attention, seen, (0, 0), 1, 2)


def test_the_facts_are_the_models(explorer: Explorer, seen: Picture) -> None:
    model = convert(vit(), SPARSE, below_breakeven="keep")
    facts = explorer.facts(SPARSE, seen)
    with torch.no_grad():
        torch.testing.assert_close(facts.answer, model(seen.image)[0].softmax(-1))
    assert facts.macs == count(model).total
    assert facts.ms > 0
    assert facts.reference_ms > 0


def test_a_click_runs_no_layer(explorer: Explorer, seen: Picture) -> None:
    asked = board.Question(seen, (0, 0), 1)
    board.side(explorer, asked, SPARSE)
    board.query(explorer, asked)
    calls = []
    for attention in (DENSE, SPARSE):
        for block in explorer.model(attention).blocks:
            block.register_forward_pre_hook(lambda module, given: calls.append(module))
    for row in range(4):
        asked = board.Question(seen, (row, 1), 1)
        board.side(explorer, asked, SPARSE)
        board.query(explorer, asked)
    assert calls == []
    board.query(explorer, board.Question(seen, (0, 0), 0))
    assert len(calls) == 0, "the first layer's input needs no layer"


def test_a_merged_picture_is_looked_at_on_its_grid(seen: Picture) -> None:
    explorer = Explorer(convert(vit(), "full", tokens="evit:keep=0.5,at=0,fuse=false"))
    assert explorer.grid(seen) == (4, 4)
    asked = [board.Question(seen, (row, column), 1) for row in range(4) for column in range(4)]
    shown = [board.side(explorer, one, OWN) for one in asked]
    assert sum("was dropped before this layer" in text for text in shown) == 8


def test_models_of_other_kinds_are_looked_at(transform) -> None:
    swin = {"img_size": 32, "embed_dim": 16, "depths": (2, 1), "num_heads": (1, 2), "window_size": 4, "num_classes": 5}
    for name, arguments, size in (
        ("swin_tiny_patch4_window7_224", swin, 32),
        ("lavit_tiny", {"img_size": 64}, 64),  # full attention does not fit into it
    ):
        model = timm.create_model(name, **arguments).eval()
        explorer = Explorer(model)
        picture = prepare(first_picture(), preprocessing(model, (size, size)))
        asked = board.Question(picture, (1, 2), explorer.layers[-1])
        assert "alert" not in board.query(explorer, asked)
        spec = "full" if explorer.reference == DENSE else OWN
        assert "alert" not in board.side(explorer, asked, spec)


def test_the_keep_rate_is_an_option_of_the_spec() -> None:
    assert keep_of("foveal:keep=0.1,cell=4") == 0.1
    assert keep_of("window") is None
    assert keep_of("nonsense") is None
    assert with_keep("foveal:keep=0.1,cell=4", 0.3) == "foveal:keep=0.3,cell=4"
    assert with_keep("window:size=4", 0.3) == "window:size=4"


def decoded(source: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))).astype(float)


def test_much_is_yellow_little_is_blue_and_the_patch_is_framed(seen: Picture) -> None:
    values = torch.zeros(4, 4)
    values[1, 2] = 1
    drawn = decoded(paint.heat(seen, values, (3, 0)))
    side = drawn.shape[0] // 4
    middle = drawn[side // 2 :: side, side // 2 :: side]
    warm = middle[..., 0] - middle[..., 2]
    assert np.unravel_index(int(warm.argmax()), warm.shape) == (1, 2)
    assert np.sort(warm.ravel())[-2] < 0 < warm.max()
    red, _, blue = drawn[-3, side // 2]
    assert red - blue > 120, "the frame at the lower edge"


def test_words_of_visitors_are_text(explorer: Explorer, seen: Picture) -> None:
    shown = board.side(explorer, board.Question(seen, (0, 0), 1), "<script>alert(1)</script>")
    assert "<script>" not in shown
    assert 'role="alert"' in shown
    assert "&lt;script&gt;" in shown


# What visitors hand in ------------------------------------------------------------------------------------------------


def test_pictures_of_every_kind_are_taken(tmp_path: Path, transform) -> None:
    rows = np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)
    colour = Image.fromarray(rows)
    colour.convert("CMYK").save(tmp_path / "cmyk.jpg")
    frames = [colour, colour.rotate(180)]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    colour.resize((1, 1)).save(tmp_path / "pixel.png")
    for path in tmp_path.iterdir():
        found = take(path, transform)
        assert found.view.shape == (32, 32, 3)
        assert found.image.isfinite().all()
    with Image.open(tmp_path / "moving.gif") as moving:
        still = prepare(moving.convert("RGB"), transform)
    assert take(tmp_path / "moving.gif", transform) == still, "the first picture of a moving one"


def test_what_is_no_picture_is_said_without_the_servers_paths(tmp_path: Path, transform) -> None:
    text, large, bomb = tmp_path / "text.jpg", tmp_path / "large.jpg", tmp_path / "bomb.png"
    text.write_text("not a picture")
    large.write_bytes(b"\xff\xd8" + bytes(MOST_BYTES))
    Image.new("1", (12_000, 9_000)).save(bomb)
    assert bomb.stat().st_size < MOST_BYTES
    assert MOST_PIXELS < 12_000 * 9_000
    for path, message in {
        text: "cannot read image 'text.jpg': cannot identify image file 'text.jpg'",
        large: "cannot read image 'large.jpg': 20.0 MB, at most 20 MB are accepted",
        bomb: "cannot read image 'bomb.png': 12000 × 9000 pixels: expected at most 50 million",
    }.items():
        with pytest.raises(BadImage, match=re.escape(message)):
            take(path, transform)


def test_a_format_that_nobody_asked_for_is_not_opened(tmp_path: Path, transform) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "picture.eps")
    (tmp_path / "picture.eps").rename(tmp_path / "picture.png")
    with pytest.raises(BadImage, match="cannot identify"):
        take(tmp_path / "picture.png", transform)


def test_there_is_a_first_picture() -> None:
    assert first_picture().size == (512, 600)


# The page -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address():
    pytest.importorskip("gradio")
    with served("columnar_micro_patch4_32", "--attention", "window:size=2") as found:
        yield found


def test_the_page_comes_from_here_alone(address: str) -> None:
    text = httpx.get(address).text
    loaded = re.findall(r"""<(?:script|link|img|iframe)[^>]*(?:src|href)=["']([^"']+)""", text)
    assert loaded
    assert not [url for url in loaded if re.match(r"(https?:)?//", url) and not url.startswith(address)]
    assert not re.search(r"@import|url\(['\"]?https?:", text)
    assert '"analytics_enabled":false' in text


def test_an_upload_over_the_limit_is_refused_by_the_server(address: str) -> None:
    files = {"files": ("large.jpg", bytes(MOST_BYTES + 1), "image/jpeg")}
    answer = httpx.post(f"{address}gradio_api/upload", files=files, timeout=60)
    assert answer.status_code == 413
    assert "exceeded maximum allowed size" in answer.text


def test_a_taken_port_is_said(address: str) -> None:
    port = address.rstrip("/").rpartition(":")[2]
    words = [sys.executable, "-m", "attendless", "explore", "columnar_micro_patch4_32", "--port", port]
    found = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert found.returncode == 2
    assert f"cannot serve at 127.0.0.1:{port}: Address already in use" in found.stderr
    assert found.stderr.count("\n") == 1


def test_clicks_and_keys_move_the_patch() -> None:
    moved = board.moved
    assert moved((0, 0), (4, 6), {"down": 0.5, "across": 0.99}) == (2, 5)
    assert moved((0, 0), (4, 6), {"down": 1.0, "across": -0.1}) == (3, 0)
    assert moved((1, 1), (4, 6), {"step": [-1, 0]}) == (0, 1)
    assert moved((0, 5), (4, 6), {"step": [0, 1]}) == (0, 5)
    for nonsense in ({}, {"down": "x", "across": 0}, {"step": [1]}, {"down": float("inf"), "across": 0}):
        assert moved((1, 1), (4, 6), nonsense) == (1, 1)
