"""SAM: relative positions folded into queries and keys. SAM 2: the blocks that attend everywhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import attendless
from attendless.convert import convert_with_report, load, save
from attendless.integrations.discovery import find_slots
from attendless.integrations.timm_inplace import rel_pos

SAM = {"depth": 3, "embed_dim": 96, "num_heads": 3, "window_size": 5, "global_attn_indexes": (1,), "num_classes": 5}
HIERA = {"stages": (1, 1, 3, 1), "global_att_blocks": (3,), "num_classes": 5, "embed_dim": 32}


def build(name: str, **arguments: Any) -> nn.Module:
    model = timm.create_model(name, **arguments)
    for key, parameter in model.named_parameters():
        if "norm" not in key:
            nn.init.normal_(parameter, std=0.1)
    return model.eval()


@pytest.fixture
def sam() -> nn.Module:
    return build("samvit_base_patch16", img_size=128, **SAM)


def by_hand(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Pair by pair: q, k, v [N, D] of one head on a grid of rows × columns, tables by offset [2 · side - 1, D]."""
    R, C = (len(rows) + 1) // 2, (len(columns) + 1) // 2
    out = []
    for i in range(R * C):
        scores = []
        for j in range(R * C):
            place = q[i] @ rows[i // C - j // C + R - 1] + q[i] @ columns[i % C - j % C + C - 1]
            scores.append(q[i] @ k[j] / q.shape[1] ** 0.5 + place)
        out.append(torch.softmax(torch.stack(scores), 0) @ v)
    return torch.stack(out)


@pytest.mark.parametrize("grid", [(3, 4), (1, 5), (4, 2)])
@pytest.mark.parametrize("at_once", [2**18, 7])
def test_folding_is_exact(grid: tuple[int, int], at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rel_pos, "_AT_ONCE", at_once)
    R, C = grid
    q, k, v = torch.randn(3, 2, 3, R * C, 8, dtype=torch.float64)
    rows, columns = (torch.randn(2 * side - 1, 8, dtype=torch.float64) for side in grid)
    tables = [table[torch.arange(s)[:, None] - torch.arange(s) + s - 1] for table, s in ((rows, R), (columns, C))]
    exact = torch.stack(
        [torch.stack([by_hand(q[b, h], k[b, h], v[b, h], rows, columns) for h in range(3)]) for b in (0, 1)]
    )
    r, c = rel_pos.biases(q, *tables)
    scale = 8**-0.5
    few = rel_pos.full(q, k, v, r, c, scale=scale)
    fused = rel_pos.full(q.requires_grad_(), k, v, r, c, scale=scale)
    wide_q, wide_k = rel_pos.fold(q, k, r, c, scale)
    folded = torch.softmax(scale * wide_q @ wide_k.transpose(-2, -1), dim=-1) @ v
    for found in (few, fused, folded):
        torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("spec", ["full", "foveal:keep=1"])
@pytest.mark.parametrize("size", [(128, 128), (96, 160)])
def test_sam_computes_the_same_at_two_sizes(sam: nn.Module, spec: str, size: tuple[int, int]) -> None:
    ours = copy.deepcopy(sam)
    attendless.patch(ours, spec, below_breakeven="keep")
    assert [str(slot.spec) for slot in find_slots(ours)] == ["full", spec, "full"]
    x = torch.randn(2, 3, *size)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), sam(x), atol=1e-4, rtol=1e-4)
    for model in (ours, sam):
        model(x).square().sum().backward()
    for (key, mine), (_, theirs) in zip(ours.named_parameters(), sam.named_parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-3, msg=key)


def test_windows_are_kept_and_said_so(sam: nn.Module) -> None:
    _, report = convert_with_report(sam, "foveal:keep=0.1", size=1024)
    assert [row.decision for row in report.layers] == ["kept", "converted", "kept"]
    assert report.layers[0].reason == "it attends in windows of 5x5 already"
    assert "1 of 3 layers converted, 2 kept (it attends in windows of 5x5 already)" in report.summary()[1]
    assert report.layers[1].after.core < report.layers[1].before.core


@torch.no_grad()
def test_counts_are_what_runs(sam: nn.Module) -> None:
    """By PyTorch's own count, at a size where windows are padded."""
    from attendless.measure.macs import layer_costs

    attendless.convert.__globals__["resize"](sam, (128, 128))
    *rows, rest = layer_costs(sam)
    assert rest.macs.total > 0
    assert rows[1].macs.core == 2 * 64 * 64 * 96
    assert rows[0].macs.core == 4 * 2 * 25 * 25 * 96
    assert rows[0].macs.projections == 4 * 25 * 4 * 96 * 96


@pytest.mark.slow
@torch.no_grad()
def test_sam_is_saved_and_loaded(tmp_path) -> None:
    model = timm.create_model("samvit_base_patch16", num_classes=3)
    ours = attendless.convert(model, "foveal:keep=0.2", size=256, below_breakeven="keep").eval()
    save(ours, tmp_path / "m.safetensors")
    again = load(tmp_path / "m.safetensors")
    assert [str(slot.spec) for slot in find_slots(again)] == [str(slot.spec) for slot in find_slots(ours)]
    x = torch.randn(1, 3, 256, 256)
    torch.testing.assert_close(again(x), ours(x), atol=0, rtol=0)


@pytest.mark.parametrize("spec", ["full", "foveal:keep=1"])
@pytest.mark.parametrize("size", [(128, 128), (128, 192)])
def test_hieras_global_blocks(spec: str, size: tuple[int, int]) -> None:
    model = build("sam2_hiera_tiny", **HIERA)
    ours = copy.deepcopy(model)
    report = attendless.patch(ours, spec, below_breakeven="keep")
    assert [row.decision for row in report.layers] == [*["kept"] * 3, "converted", *["kept"] * 2]
    x = torch.randn(2, 3, *size)
    torch.testing.assert_close(ours(x), model(x), atol=1e-4, rtol=1e-4)
    attendless.unpatch(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in model.modules()]
