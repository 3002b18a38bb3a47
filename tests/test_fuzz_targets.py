"""Fuzz targets for what strangers write: metadata of saved and exported files, specs and images.

Each case is refused with a `UserError` on one line, or accepted with values that a program can use. Hypothesis draws
the cases; $ATTENDLESS_FUZZ says how many in all (default 10,000, always the same ones).
"""

from __future__ import annotations

import copy
import io
import json
import math
import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

import attendless
from attendless.attention import expand, parse
from attendless.convert import files
from attendless.data.preprocessing import evaluation_transform
from attendless.data.source import load_image
from attendless.errors import UserError, printable
from attendless.export import description
from attendless.options import Options
from attendless.sizes import parse_size
from attendless.storage import read_described
from attendless.tokens import parse_tokens

CASES = int(os.environ.get("ATTENDLESS_FUZZ", "10000"))
#: Seconds that one case may take on a busy machine.
SLOWEST = 20.0


def cases(share: float) -> settings:
    """A share of all cases. Models are built for saved files, so that target is the slowest."""
    return settings(
        max_examples=int(share * CASES),
        deadline=None,
        database=None,
        derandomize=CASES <= 10_000,
        suppress_health_check=list(HealthCheck),
    )


def accepted(read: Callable[[], Any], case: object) -> Any:
    """What `read` returns, or None for a `UserError`. Everything else fails the test."""
    began = time.monotonic()
    try:
        return read()
    except UserError as error:
        told = str(error)
        assert told, case
        assert told == printable(told), case
        assert len(told) < 3000 + 2 * len(str(case)), case  # it may quote what was given, and no more
        return None
    finally:
        assert time.monotonic() - began < SLOWEST, case


# JSON with a few values exchanged -------------------------------------------------------------------------------------

NUMBERS = (0, -1, 1, 3, 10**6, 10**12, 2**63, -(10**30), 10**400, 1e-9, 1e300, -0.0, math.nan, math.inf, 0.5)
TEXTS = (
    "",
    "a",
    "full",
    "foveal:keep=0.1",
    "hf-hub:a/b",
    "\x1b[2J",
    "\u202e",
    "9" * 5000,
    "nn.Linear",
    "os.system",
    "é",
)
ODD = (None, True, False, *NUMBERS, *TEXTS, [], {}, [[]], ["a"], [1, 2], [[1] * 3] * 3, {"a": {}})
LETTERS = "abcxyz_.:/- 019\n\x1b\x9béß视٣\ud800\u202e\U0001f600"
#: A source of random choices for each case: faster than drawing each choice from Hypothesis, which draws the seed.
draws = st.integers(0, 2**64 - 1).map(random.Random)


def word(draw: random.Random, most: int) -> str:
    return "".join(draw.choices(LETTERS, k=draw.randint(0, most)))


def odd(draw: random.Random) -> Any:
    """A value that a header does not expect."""
    kind = draw.randint(0, 9)
    if kind < 6:
        return copy.deepcopy(draw.choice(ODD))  # later changes may be inside it
    if kind == 6:
        return draw.randint(-(10 ** draw.randint(0, 20)), 10 ** draw.randint(0, 20))
    if kind == 7:
        return struct.unpack("<d", draw.randbytes(8))[0]
    return word(draw, 20) if kind == 8 else [odd(draw) for _ in range(draw.randint(0, 4))]


def places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a JSON object, but for itself."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, child in inner for path in ((*here, key), *places(child, (*here, key)))]


def changed(base: Any, draw: random.Random) -> Any:
    """A copy with up to four values exchanged, removed or added."""
    value = json.loads(json.dumps(base))
    for _ in range(draw.randint(1, 4)):
        there = places(value)
        if not there:
            return odd(draw)
        *path, last = draw.choice(there)
        parent = value
        for key in path:
            parent = parent[key]
        kind = draw.randint(0, 9)
        if kind == 0:
            del parent[last]
        elif kind == 1 and isinstance(parent, dict):
            parent[word(draw, 8)] = odd(draw)
        elif kind == 2 and isinstance(parent, list):
            parent.extend([parent[last]] * draw.choice((1, 3, 5000)))
        else:
            parent[last] = odd(draw)
    return value


def as_text(value: Any, draw: random.Random) -> str:
    """As JSON, one time in ten with a part cut out or doubled."""
    text = json.dumps(value)
    if draw.randint(0, 9):
        return text
    start, end = sorted((draw.randint(0, len(text)), draw.randint(0, len(text))))
    return draw.choice((text[:start] + text[end:], text[:end] + text[start:]))


def check_usable(config: dict[str, Any]) -> None:
    """Images pass through the preprocessing that a file states, and come out as numbers."""
    size = config["input_size"]
    if size[-1] * size[-2] > 256 * 256 or size[0] != 3 or len(config["mean"]) not in (1, 3):
        return
    if max(size[-2:]) / config["crop_pct"] > 4096:
        return
    pixels = evaluation_transform(config)(Image.new("RGB", (40, 30), (250, 3, 90)))
    assert tuple(pixels.shape) == tuple(size), config
    assert bool(torch.isfinite(pixels).all()), config


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    path = tmp_path_factory.mktemp("saved") / "m.safetensors"
    model = timm.create_model("columnar_micro_patch4_32", depth=1, embed_dim=16, num_heads=2, num_classes=3)
    model.pretrained_cfg = {**model.pretrained_cfg, "label_names": ("cat", "dog", "cow")}
    attendless.save(attendless.convert(model, "foveal:keep=0.5", below_breakeven="keep"), path)
    text, tensors = read_described(path, "attendless", "")
    return json.loads(text), tensors


def test_metadata_of_saved_files(saved: tuple[dict[str, Any], dict[str, torch.Tensor]]) -> None:
    base, tensors = saved
    told, sizes = {"read": 0, "built": 0}, [value.shape for value in tensors.values()]

    @cases(0.05)
    @given(draws)
    def target(draw: random.Random) -> None:
        text = as_text(changed(base, draw), draw)
        header = accepted(lambda: files._header("m.safetensors", text), text[:2000])
        if header is None:
            return
        told["read"] += 1
        model = accepted(lambda: files._assemble("m.safetensors", header, tensors), text[:2000])
        if model is None:
            return
        told["built"] += 1
        assert [value.shape for value in model.state_dict().values()] == sizes or len(sizes) == len(model.state_dict())
        config = header.get("preparation", {})
        if {"input_size", "mean", "std", "crop_pct"} <= {name for name, value in config.items() if value is not None}:
            check_usable({name: config.get(name) for name in ("input_size", "mean", "std", "crop_pct")})

    target()
    assert told["built"] > CASES // 1000  # the changes are not all fatal


def test_metadata_of_exported_files() -> None:
    model = attendless.Columnar(patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=3, img_size=32)
    base = json.loads(description.describe(model).as_json()) | {"class_names": ["a", "b", "c"]}
    told = {"read": 0}

    @cases(0.3)
    @given(draws)
    def target(draw: random.Random) -> None:
        text = as_text(changed(base, draw), draw)
        found = accepted(lambda: description.read(text, "m.onnx"), text[:2000])
        if found is None:
            return
        told["read"] += 1
        assert all(isinstance(side, int) and 0 < side <= 2**16 for side in (*found.size, found.batch or 1))
        assert all(type(value) is bool for value in (found.features, found.kernels, found.int8))
        assert printable(list(found.class_names)) == list(found.class_names)
        check_usable(found.data_config())

    target()
    assert told["read"] > CASES // 100


# Specs ----------------------------------------------------------------------------------------------------------------

SPECS = (
    *("full", "foveal:keep=0.1,cell=2", "window:size=7,shift=3", "bigbird:form=1d,block=8,random=1", "axial", "xca"),
    *("2xfull/10xfoveal:keep=0.1", "window+window:shift=3/reduced:ratio=8/xca/full", "performer", "linformer:keys=40"),
    *("sparsifiner:keep=0.25,basis=32", "topk:keep=0.5", "reduced:pool=7", "efficient", "fastformer", "less:vanilla=4"),
    *("tome:r=8", "tome:keep=0.3", "evit:keep=0.7,at=3/6/9,fuse", "dynamicvit:keep=0.7", "none", "384", "240x320"),
)
PIECES = (
    *":=,/+x.-_ \t\n\0%'\"{}[]()|\\0123456789abkeX",
    *("nan", "inf", "-inf", "1e400", "1e-400", "-1", "none", "true", "99999999999999999999", "9" * 5000, "1_0", "0x10"),
    *(
        "²",
        "٣",
        "é",
        "视",
        "\ud800",
        "\x1b[2J",
        "full",
        "foveal:",
        "keep=",
        "12x",
        "999999xfull",
        "//",
        "++",
        "::",
        "==",
    ),
)


def spec(draw: random.Random) -> str:
    text = draw.choice(SPECS) if draw.randint(0, 9) else word(draw, 30)
    for _ in range(draw.randint(0, 5)):
        start, end = sorted((draw.randint(0, len(text)), draw.randint(0, len(text))))
        piece = draw.choice(PIECES)
        text = draw.choice((text[:start] + piece + text[end:], text[:start] + piece + text[start:], text * 2))
    return text[:20_000]


def in_range(options: Options) -> bool:
    values = [value for one in vars(options).values() for value in (one if isinstance(one, tuple) else (one,))]
    return all(math.isfinite(value) for value in values if isinstance(value, float))


@cases(0.5)
@given(draws.map(spec))
@example("999999xfull")
@example("foveal:keep=٣")
def test_specs(text: str) -> None:
    for read in (parse, parse_tokens):
        found: Any = accepted(lambda: read(text), text)  # noqa: B023
        if found is not None:
            assert read(str(found)) == found, text
            assert in_range(found.options), text
    layers = accepted(lambda: expand(text, 12), text)
    assert layers is None or (len(layers) == 12 and all(in_range(spec.options) for spec in layers)), text
    sides = accepted(lambda: parse_size(text), text)
    assert sides is None or all(0 < side <= 2**16 for side in sides), text


# Images ---------------------------------------------------------------------------------------------------------------


def _encoded() -> list[bytes]:
    """Small images of many formats and modes."""
    pixels = np.random.default_rng(0).integers(0, 256, (9, 13, 4), dtype=np.uint8)
    found = []
    for mode, formats in {
        "RGB": ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", "PPM", "ICO", "TGA", "PCX", "JPEG2000"),
        "RGBA": ("PNG", "WEBP", "TIFF"),
        "L": ("PNG", "JPEG", "TIFF"),
        "P": ("PNG", "GIF"),
        "1": ("PNG", "TIFF"),
        "I;16": ("PNG", "TIFF"),
        "CMYK": ("JPEG", "TIFF"),
    }.items():
        image = Image.fromarray(pixels[..., :3])
        image = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257) if mode == "I;16" else image.convert(mode)
        for format in formats:
            buffer = io.BytesIO()
            exif = Image.Exif()
            exif[0x0112] = 6
            image.save(buffer, format, **({"exif": exif} if format in ("JPEG", "WEBP") else {}))
            found.append(buffer.getvalue())
    return found


ENCODED = _encoded()


#: Widths, heights and lengths in headers.
LENGTHS = (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\0\xff\xff", b"\x7f\xff\0\0")


def encoded(draw: random.Random) -> bytes:
    data = bytearray(draw.choice(ENCODED))
    for _ in range(draw.randint(0, 3)):
        # Most of what readers believe is in the first bytes.
        at = draw.randint(0, min(len(data), draw.choice((64, len(data)))))
        match draw.randint(0, 4):
            case 0:
                data[at : at + 1] = bytes([draw.randint(0, 255)])
            case 1:
                del data[at : at + draw.randint(1, 9)]
            case 2:
                data[at:at] = draw.randbytes(draw.randint(0, 9))
            case 3:
                data[at : at + 4] = draw.choice(LENGTHS)
            case _:
                del data[at:]
    return bytes(data)


def test_images(tmp_path: Path) -> None:
    path, told = tmp_path / "image", {"read": 0}
    prepare = evaluation_transform(
        {"input_size": (3, 16, 16), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 0.9, "interpolation": "bilinear"}
    )

    @cases(0.15)
    @given(draws.map(encoded))
    def target(data: bytes) -> None:
        path.write_bytes(data)
        image = accepted(lambda: load_image(path, most_pixels=1_000_000), data[:200])
        if image is None:
            return
        told["read"] += 1
        assert image.mode == "RGB"
        assert image.width * image.height <= 1_000_000
        assert tuple(prepare(image).shape) == (3, 16, 16)

    target()
    assert CASES // 200 < told["read"] < CASES
