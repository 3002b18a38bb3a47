"""Patches that a tower holds block by block: the way to row-major order and back, and towers of detectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attendless
from attendless.integrations.hf_interface import interface
from attendless.integrations.token_order import Blocks, segment

pytest.importorskip("transformers")

from packed_models import DIVIDED, PATCH, positions
from test_huggingface_interface import furthest, gradient, run


@pytest.mark.parametrize(
    ("height", "width", "sides"), [(4, 6, (2,)), (8, 12, (4, 2)), (10, 6, (4, 2)), (7, 5, (3,)), (6, 6, ())]
)
def test_blocks_are_walked_as_loops_do(height: int, width: int, sides: tuple[int, ...]) -> None:
    found = segment((2, height, width), 3, Blocks(height, width, tuple((side, side) for side in sides)))
    held = [0, 1, 2] + [
        3 + frame * height * width + y * width + x for frame in range(2) for y, x in positions(height, width, sides)
    ]
    x = torch.tensor(held)[None, None, :, None]
    assert found.row_major(x).flatten().tolist() == list(range(found.tokens))
    assert torch.equal(found.as_held(found.row_major(x)), x)


def test_every_part_has_its_prefix() -> None:
    """Two by two windows of two by one patches, each behind a class token."""
    found = segment((1, 4, 2), 1, Blocks(4, 2, ((2, 1),)), parts=4)
    assert str(found.grid) == "4+4x2"
    assert found.order is not None
    assert found.order.tolist() == [0, 3, 6, 9, *(1, 4, 2, 5, 7, 10, 8, 11)]


@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.parametrize("size", [(32, 32), (16, 64)])
def test_attending_to_everything_is_the_original(name: str, size: tuple[int, int]) -> None:
    model = DIVIDED[name]()
    torch.manual_seed(1)
    inputs = {"pixel_values": torch.randn(2, 3, *size)}
    then, slope = run(model, inputs), gradient(model, inputs)
    report = attendless.patch(model, "foveal:keep=1", below_breakeven="keep")
    assert [(row.decision, row.grid) for row in report.layers] == {
        "rf_detr": [("kept", "1+4x4"), ("converted", "4+8x8"), ("kept", "1+4x4")],
        "lw_detr": [("kept", "4x4"), ("converted", "8x8"), ("kept", "4x4")],
    }[name]
    assert furthest(then, run(model, inputs)) < 1e-4
    assert furthest(slope, gradient(model, inputs), float(max(value.abs().max() for value in slope))) < 1e-4
    attendless.patch(model, "foveal:keep=0.1", below_breakeven="keep")
    assert furthest(then, run(model, inputs)) > 1e-4, "nothing attends less"
    attendless.unpatch(model)
    assert all(map(torch.equal, then, run(model, inputs)))


@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.parametrize("size", [(32, 32), (16, 64)])
def test_a_changed_pixel_changes_the_token_of_its_patch(
    name: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = DIVIDED[name]()
    attendless.patch(model, "foveal:keep=1", below_breakeven="keep")
    used: list[Any] = []
    attend = interface._attend_segment
    monkeypatch.setattr(interface, "_attend_segment", lambda a, s, *qkv: (used.append(s), attend(a, s, *qkv))[1])
    seen: list[Tensor] = []
    layers = model.encoder.layer
    layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    torch.manual_seed(1)
    pixels = torch.randn(1, 3, *size)
    run(model, {"pixel_values": pixels})
    row, column = 1, size[1] // PATCH - 2
    pixels[..., PATCH * row + 1, PATCH * column + 1] += 5
    run(model, {"pixel_values": pixels})
    # Windows are the batch of the first layer; the layer that attends to all tokens has them in one row.
    (changed,) = np.flatnonzero((seen[0] - seen[1]).abs().amax(-1).flatten() > 0)
    place = used[-1].grid.prefix + row * (size[1] // PATCH) + column
    assert int(used[-1].order[place]) == changed
