"""Ten thousand random and mutated specs, sizes and files: each is read, or refused with a `UserError`."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
from safetensors.torch import save_file

import attendless
from attendless.attention import expand, parse
from attendless.convert.files import read_header
from attendless.errors import UserError
from attendless.integrations.weights import load_weights, read_weights
from attendless.sizes import parse_size
from attendless.storage import digest, read_described, write_described

SPECS = (
    *("full", "foveal:keep=0.1,cell=2", "window:size=7,shift=3", "bigbird:form=1d,block=8,random=1", "axial"),
    *("2xfull/10xfoveal:keep=0.1", "window+window:shift=3/reduced:ratio=8/xca/full", "performer", "linformer:keys=40"),
    *("sparsifiner:keep=0.25,basis=32", "topk:keep=0.5", "reduced:pool=7", "efficient", "fastformer", ""),
)
SIZES = ("384", "240x320", "224X224", "1", "65536", "0x0", " 32", "32 ")
#: What tends to break readers: signs of the grammar, extreme numbers, letters that are digits elsewhere.
PIECES = (
    *":=,/+x.-_ \t\n\0%'\"{}[]()|\\0123456789abkeX",
    *("nan", "inf", "-inf", "1e400", "1e-400", "-1", "none", "true", "false", "99999999999999999999", "9" * 5000),
    *("²", "٣", "é", "视", "\ud800", "full", "foveal:", "keep=", "12x", "x12", "//", "++", "::", "=="),
)


def mutated(text: str, draw: random.Random) -> str:
    """`text` with a few pieces put in, taken out, doubled or exchanged."""
    for _ in range(draw.randint(1, 5)):
        at, until = sorted(draw.randint(0, len(text)) for _ in range(2))
        piece = draw.choice(PIECES)
        text = draw.choice(
            (
                text[:at] + piece + text[at:],
                text[:at] + text[until:],
                text[:at] + piece + text[until:],
                text + text[at:],
            )
        )[:20000]
    return text


def answers(read: Callable[[], Any], given: object) -> bool:
    """Whether `read` succeeds; anything but success and a `UserError` on one line fails the test."""
    try:
        read()
    except UserError as error:
        assert str(error), given
        return False
    except Exception as error:
        pytest.fail(f"{given!r}: {type(error).__name__}: {error}")
    return True


def test_specs_and_sizes() -> None:
    draw, read = random.Random(0), 0
    for _ in range(6000):
        text = mutated(draw.choice(SPECS), draw)
        read += answers(lambda: parse(text), text)  # noqa: B023
        read += answers(lambda: expand(text, draw.choice((1, 4, 12))), text)  # noqa: B023
    assert 100 < read < 11000  # neither everything nor nothing: the mutations are of the telling kind
    read = 0
    for _ in range(2000):
        text = mutated(draw.choice(SIZES), draw)
        read += answers(lambda: parse_size(text), text)  # noqa: B023
    assert 10 < read < 1900


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """A small model as `save` writes it, and its weights alone."""
    root = tmp_path_factory.mktemp("saved")
    model = timm.create_model("columnar_micro_patch4_32", depth=1, embed_dim=16, num_heads=2, num_classes=3)
    attendless.save(attendless.convert(model, "foveal:keep=0.5", below_breakeven="keep"), root / "m.safetensors")
    save_file(model.state_dict(), root / "w.safetensors")
    return (root / "m.safetensors").read_bytes(), (root / "w.safetensors").read_bytes()


def test_bytes_of_files(saved: tuple[bytes, bytes], tmp_path: Path) -> None:
    """Bits flipped, bytes cut out, lengths changed: most of it in the header, which is what readers believe."""
    draw, sound = random.Random(1), 0
    path = tmp_path / "f.safetensors"
    model = timm.create_model("columnar_micro_patch4_32", depth=1, embed_dim=16, num_heads=2, num_classes=3)
    for i in range(1500):
        data = bytearray(saved[i % 2])
        header = 8 + int.from_bytes(data[:8], "little")
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(header if draw.random() < 0.8 else len(data))
            draw.choice(
                (
                    lambda: data.__setitem__(at, draw.randrange(256)),  # noqa: B023
                    lambda: data.__setitem__(slice(0, 8), struct.pack("<Q", draw.choice((0, 1, header, 2**63)))),  # noqa: B023
                    lambda: data.__delitem__(slice(at, at + draw.randint(1, 9))),  # noqa: B023
                    lambda: data.__setitem__(at, data[at] ^ (1 << draw.randrange(8))),  # noqa: B023
                )
            )()
            data = data or bytearray(b"\0")
        path.write_bytes(data)
        if i % 2:
            sound += answers(lambda: load_weights(model, read_weights(path)), bytes(data[:200]))
        else:
            sound += answers(lambda: read_header(path), bytes(data[:200]))
            sound += answers(lambda: attendless.load(path), bytes(data[:200]))
    assert sound < 1000


def changed(value: Any, draw: random.Random) -> Any:
    """A JSON value with one place in it exchanged."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(list(value))
        if draw.random() < 0.15:
            return {k: v for k, v in value.items() if k != name}
        return {**value, name: changed(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        at = draw.randrange(len(value))
        return [*value[:at], changed(value[at], draw), *value[at + 1 :]]
    if isinstance(value, str) and draw.random() < 0.5:
        return mutated(value, draw).encode("utf-8", "replace").decode()
    if isinstance(value, int) and not isinstance(value, bool) and draw.random() < 0.5:
        return draw.choice((0, -1, value + 1, 3, float(value)))
    return draw.choice((None, True, "", "full", [], {}, 0, -3, 1.5, [1, 2], {"a": 1}, "nn.Linear", "os.system"))


def test_headers_that_lie(saved: tuple[bytes, bytes], tmp_path: Path) -> None:
    """Files with a right digest whose header describes something else: as somebody might write them on purpose."""
    draw, sound = random.Random(2), 0
    path = tmp_path / "f.safetensors"
    path.write_bytes(saved[0])
    text, tensors = read_described(path, "attendless", "")
    assert digest(text, tensors)
    for _ in range(700):
        header = json.loads(text)
        for _ in range(draw.randint(1, 3)):
            header = changed(header, draw)
        write_described(path, "attendless", json.dumps(header), tensors)
        answers(lambda: read_header(path), header)
        sound += answers(lambda: attendless.load(path), header)
    assert sound < 500
