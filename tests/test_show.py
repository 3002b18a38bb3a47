"""Pictures of what models look at: drawn, and drawn of the right thing."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

from attendless import Pyramid, UserError, convert
from attendless.measure.accuracy import preprocessing
from attendless.show import looking
from attendless.show.gallery import FIGURES
from attendless.show.scene import Scene, pixel_seen, scene, spread
from attendless_cli import show
from attendless_cli.main import main

#: An attention that each figure is made for.
OF = {"foveal": "foveal:keep=0.3,cell=2,tile=1", "tokens": "full"}


def picture(width: int = 80, height: int = 60) -> Image.Image:
    rows, columns = np.mgrid[:height, :width]
    colours = np.stack([3 * columns % 256, 4 * rows % 256, (rows + columns) % 256], -1)
    return Image.fromarray(colours.astype(np.uint8))


def look(attention: str = "full", tokens: str = "none", **changes: object) -> Scene:
    torch.manual_seed(0)
    dense = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5).eval()
    model = convert(dense, attention, tokens=tokens, below_breakeven="keep")
    return scene(model, picture(), size=(32, 32), **changes)


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn(name: str, tmp_path: Path) -> None:
    attention = OF.get(name, "sparsifiner:keep=0.5,rank=9" if name.startswith("sparsifiner") else "window:size=2")
    figure = FIGURES[name](look(attention, "tome:r=4" if name == "tokens" else "none", layers=[0, 1]))
    for axes in figure.axes:
        assert axes.images or axes.lines or axes.collections, "no panel is left empty"
    figure.savefig(tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").stat().st_size > 1000
    assert overlapping(figure) == []


def test_stages_may_differ_in_their_heads() -> None:
    shape = {"embed_dims": (16, 32), "depths": (1, 1), "num_heads": (1, 2), "img_size": 32, "num_classes": 5}
    seen = scene(Pyramid("window:size=2/full", **shape).eval(), picture(), size=(32, 32))
    figure = looking.draw_maps(seen)
    assert [len(axes.images) for axes in figure.axes] == [1, 2, 0, 1, 2, 2]
    for name in ("sparsifiner-3", "bbvit-1"):
        FIGURES[name](seen)


def test_a_model_that_full_attention_does_not_fit_is_shown_without_it() -> None:
    model = timm.create_model("lavit_tiny", img_size=64).eval()
    seen = scene(model, picture(), size=(64, 64), layers=[4, 5])
    looking.draw_maps(seen)
    with pytest.raises(UserError, match="was built for other attentions"):
        looking.draw_sparse(seen)


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts of which one covers a part of the other."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    texts = [one for one in figure.findobj(Text) if one.get_visible() and one.get_text().strip()]
    boxes = [(one.get_text(), one.get_window_extent(renderer).shrunk(0.95, 0.95)) for one in texts]
    return [(a, b) for (a, here), (b, there) in itertools.combinations(boxes, 2) if here.overlaps(there)]


def test_overlapping_texts_are_found() -> None:
    figure = Figure()
    figure.text(0.5, 0.5, "one")
    figure.text(0.5, 0.5, "two")
    assert overlapping(figure) == [("one", "two")]


def test_the_command_line_knows_every_figure() -> None:
    assert list(show.FIGURES) == list(FIGURES)


def test_the_map_drawn_is_the_map_used() -> None:
    seen = look("foveal:keep=0.3,cell=2,tile=1", query=(20, 50))
    figure = looking.draw_maps(seen)
    (one,) = [m for m in seen.maps() if m.layer == 1]
    drawn = [axes.images[-1].get_array() for axes in figure.axes[4:6]]  # the second row, without its picture
    np.testing.assert_allclose(drawn, one.on_grid()[0, :, 0].numpy(), atol=1e-6)


def test_a_pixel_of_the_file_is_found_in_what_the_model_sees() -> None:
    transform = preprocessing(look().model, (32, 32), 1.0)
    dot = np.zeros((60, 80, 3), dtype=np.uint8)
    dot[33:36, 50:53] = 255
    seen = transform(Image.fromarray(dot))[0]
    row, column = divmod(int(seen.argmax()), 32)
    x, y = pixel_seen((51, 34), (80, 60), transform)
    assert abs(x - column) <= 1
    assert abs(y - row) <= 1
    with pytest.raises(UserError, match="query 2,34 is outside the crop: the model sees the image from"):
        pixel_seen((2, 34), (80, 60), transform)
    with pytest.raises(UserError, match="query 80,34 is outside the image: expected x,y below 80,60"):
        pixel_seen((80, 34), (80, 60), transform)


def test_layers_are_spread_from_the_first_to_the_last() -> None:
    assert spread(range(12)) == [0, 4, 7, 11]
    assert spread(range(2)) == [0, 1]


def test_figures_of_another_mechanism_are_refused() -> None:
    for name in ("sparsifiner-6", "foveal"):
        with pytest.raises(UserError, match="this figure needs"):
            FIGURES[name](look("window:size=2"))


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture().save(tmp_path / "picture.png")
    words = ["show", "columnar_micro_patch4_32", str(tmp_path / "picture.png"), "--layers", "0,-1"]
    out = tmp_path / "maps.pdf"
    assert main([*words, "--query", "40,30", "--out", str(out), "--json", str(tmp_path / "maps.json")]) == 0
    assert out.read_bytes().startswith(b"%PDF")
    printed = capsys.readouterr()
    assert "maps of full, layers 0, 2" in printed.out
    assert "random weights" in printed.err
    for wrong, message in {
        ("--layers", "9"): "layers '9'",
        ("--query", "400,3"): "query 400,3 is outside the image",
        ("--query", "4"): "expected X,Y in pixels",
        ("--heads", "7"): "head 7 does not exist",
        ("--figure", "sparsifiner-7"): "this figure needs sparsifiner",
    }.items():
        with pytest.raises(SystemExit):
            main([*words, *wrong, "--out", str(tmp_path / "no.png")])
        assert message in capsys.readouterr().err
        assert not (tmp_path / "no.png").exists()


# Pictures of every kind -----------------------------------------------------------------------------------------------


@pytest.fixture
def shown(tmp_path: Path):
    """What `attendless show` does with a picture file: its exit code, and the words it said."""

    def show_it(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
        words = ["show", "columnar_micro_patch4_32", str(path), "--out", str(tmp_path / "shown.png")]
        try:
            code = main(words)
        except SystemExit as stop:
            code = stop.code
        return code, capsys.readouterr().err

    return show_it


def test_a_picture_of_any_size_and_kind_is_shown(shown, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    colour = picture()
    Image.new("L", (12_000, 9_000), 90).save(tmp_path / "large.jpg")
    colour.resize((1, 1)).save(tmp_path / "pixel.png")
    colour.save(tmp_path / "moving.gif", save_all=True, append_images=[colour.rotate(180)])
    colour.convert("CMYK").save(tmp_path / "cmyk.jpg")
    for name in ("large.jpg", "pixel.png", "moving.gif", "cmyk.jpg"):
        code, said = shown(tmp_path / name, capsys)
        assert code == 0, said
        assert said.splitlines() == ["random weights: these are the maps of an untrained model"]
        (tmp_path / "shown.png").unlink()


def test_what_is_no_picture_is_said_in_one_line(shown, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.jpg").write_text("not a picture")
    Image.new("1", (20_000, 20_000)).save(tmp_path / "bomb.png")
    for name, message in {"text.jpg": "cannot identify image file", "bomb.png": "decompression bomb"}.items():
        code, said = shown(tmp_path / name, capsys)
        assert code == 2
        assert said.startswith("attendless: error: cannot read image")
        assert message in said
        assert said.count("\n") == 1
        assert not (tmp_path / "shown.png").exists()
