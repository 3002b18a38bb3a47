"""How should foveal attention average keys with rotary position embeddings? Comparison with full attention.

    python benchmarks/rotary.py --weights deit_tiny_patch16_224.safetensors --data DIR [--size 384 512] [--keep 0.1]
                                [--content 0]      # q and k equal for all tokens: attention by position only
                                [--made-up]        # synthetic q and k with one frequency: the worst case
                                [--features]       # whole models instead: features of the last layer

The benchmark takes q, k and v of every layer of a trained DeiT-Tiny, on images of DIR, and rotates q and k by the
positions of three families of models. It then compares foveal attention with full attention on the same q, k and v, so
no trained rotary model is needed. Rows of the table, by position embedding:

    none        no rotation, for reference
    integer     angle = position / 10000^(4j/D), positions 0, 1, 2, …                        (PE, DeepSeek)
    16 across   the same, with positions scaled to a grid that is 16 patches wide            (EVA-02)
    normalised  angle = 2π · position / 100^(4j/D), positions from -1 to 1 across the grid   (DINOv3)

Columns, by the key of a cell:

    rotated     mean of the rotated keys; the cell's score is the mean of its tokens' scores
    centred     mean of the unrotated keys, rotated by the cell's centre; rotation does not shorten it

Each entry is the mean cosine similarity per patch between the outputs of foveal and full attention, over all heads. The
number in brackets is the mean ratio of the lengths of the two keys, rotated over unrotated.

`--features` compares whole models: rotary models of timm with random weights, and the trained DeiT-Tiny. The entry is
the mean cosine similarity per patch of the last layer's features. With random weights, attention is nearly uniform and
easy to approximate, so these entries only show that the implementation works.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from attendless.convert import convert, open_model
from attendless.data.opening import open_data
from attendless.measure.accuracy import preprocessing
from attendless.sparse import foveal as definition
from attendless.stamp import stamp, stamp_line

POSITIONS = ("none", "integer", "16 across", "normalised")
#: Side of the cells and of the coarse cells (0: none); the side of the tiles is chosen automatically.
LAYOUTS = ((2, 0), (2, 4), (4, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights")
    parser.add_argument("--data")
    parser.add_argument("--size", type=int, nargs="+", default=[384, 512])
    parser.add_argument("--keep", type=float, default=0.1)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--made-up", action="store_true", help="synthetic q and k with the highest frequency only")
    parser.add_argument("--features", action="store_true", help="compare whole models by their last features")
    parser.add_argument(
        "--content", type=float, default=1.0, help="scale of the differences between tokens in q and k (0: all equal)"
    )
    args = parser.parse_args()
    print(stamp_line(stamp()))
    if args.features:
        features(args)
        return
    for size in args.size:
        side = size // 16
        print(f"\n{size} px, {side}x{side} patches, keep {args.keep:g}, content {args.content:g}: cosine per patch")
        print("| positions | " + " | ".join(f"cell {c}, coarse {o}: {w}" for c, o in LAYOUTS for w in KINDS) + " |")
        print("|---" * (1 + len(LAYOUTS) * len(KINDS)) + "|")
        layers = (
            [made_up(side, sharp) for sharp in (2.0, 8.0)]
            if args.made_up
            else [
                (*(t.mean(2, keepdim=True).lerp(t, args.content) for t in (q, k)), v)
                for q, k, v in real(args.weights, args.data, size, args.images)
            ]
        )
        for positions in POSITIONS:
            cells = []
            for cell, coarse in LAYOUTS:
                layout = definition.layout(side, side, 1, keep=args.keep, cell=cell, coarse=coarse)
                angle = angles(side, positions, layers[0][0].shape[-1])
                found = {kind: [] for kind in KINDS}
                lengths = []
                for q, k, v in layers:
                    rotated_q, rotated_k = rotate(q, angle), rotate(k, angle)
                    exact = F.scaled_dot_product_attention(rotated_q, rotated_k, v)
                    for kind in KINDS:
                        ours = foveal(q, k, v, angle, layout, centred=kind == "centred")
                        found[kind].append(cosine(ours, exact))
                    block = definition.block_of(layout, cell)
                    means = [definition.blur(t[:, :, 1:], block, layout.cells)[0] for t in (rotated_k, k)]
                    lengths.append(float((means[0].norm(dim=-1) / means[1].norm(dim=-1)).mean()))
                cells += [f"{sum(c) / len(c):.4f}" for c in found.values()]
                cells[-len(KINDS)] += f" ({sum(lengths) / len(lengths):.2f})"
            print(f"| {positions} | " + " | ".join(cells) + " |", flush=True)


KINDS = ("rotated", "centred")
#: Rotary models and their position embeddings.
ROTARY = {
    "vit_small_patch16_dinov3": "normalised",
    "eva02_tiny_patch14_224": "16 across",
    "vit_pe_core_tiny_patch16_384": "integer",
}


@torch.inference_mode()
def features(args: argparse.Namespace) -> None:
    print("\n| model | weights | positions | size | cosine per patch |\n|---|---|---|---|---|")
    for size in args.size:
        for name in ("deit_tiny_patch16_224", *ROTARY):
            weights = args.weights if name not in ROTARY else None
            patch = 14 if "patch14" in name else 16
            torch.manual_seed(0)
            model = open_model(name, weights=weights, size=size // patch * patch).eval()
            images = load(model, args.data, size // patch * patch, args.images)
            ours = convert(model, f"foveal:keep={args.keep:g}", below_breakeven="keep")
            a, b = (m.forward_features(images)[:, m.num_prefix_tokens :] for m in (model, ours))
            found = float(F.cosine_similarity(a, b, dim=-1).mean())
            whose, how = ("its own", "none") if weights else ("random", ROTARY[name])
            print(f"| {name} | {whose} | {how} | {size // patch * patch} | {found:.4f} |", flush=True)


def load(model: torch.nn.Module, data: str, size: int, count: int) -> Tensor:
    source, prepare = open_data(data), preprocessing(model, (size, size), 1.0)
    return torch.stack([prepare(source[i * len(source) // count][0]) for i in range(count)])


@torch.inference_mode()
def real(weights: str, data: str, size: int, count: int):
    """q, k, v [B, H, N, D] of every layer."""
    model = convert(open_model("deit_tiny_patch16_224", weights=weights, size=size), "full")
    for step in model.walk(*model.embed(load(model, data, size, count))):
        if step.number == len(model.blocks):  # the step after the last block
            return
        block = model.blocks[step.number]
        yield block.attn.project(block.norm1(step.x))


def made_up(side: int, sharp: float) -> tuple[Tensor, Tensor, Tensor]:
    """Synthetic q, k and v of a head that attends by position only, with the highest rotary frequency.

    sharp: scores range from -sharp to sharp. Values vary smoothly over the grid, with noise."""
    draws, N = torch.Generator().manual_seed(0), side * side + 1
    q = torch.zeros(1, 1, N, 64)
    q[..., 0] = q[..., 16] = (sharp * 8 / 2) ** 0.5
    smooth = F.interpolate(torch.randn(1, 64, 6, 6, generator=draws), size=(side, side), mode="bicubic")
    v = 0.3 * torch.randn(1, 1, N, 64, generator=draws)
    v[0, 0, 1:] += smooth[0].flatten(1).T
    return q, q, v


def angles(side: int, positions: str, width: int) -> Tensor:
    """The angle of each patch for each pair of channels, [patches, D/2]: rows first, then columns."""
    number = torch.arange(width // 4) / (width // 4)
    place = torch.arange(side).float()
    if positions == "normalised":
        one = 2 * math.pi * ((place + 0.5) / side * 2 - 1)[:, None] / 100.0**number
    else:
        step = {"none": 0.0, "integer": 1.0, "16 across": 16 / side}[positions]
        one = step * place[:, None] / 10000.0**number
    rows, columns = one[:, None].expand(side, side, -1), one[None].expand(side, side, -1)
    return torch.cat([rows, columns], dim=-1).flatten(0, 1)


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate x [B, H, P + n, D] by angle [n, D/2]; the first P tokens are not rotated."""
    prefix = x.shape[2] - len(angle)
    a, b = x[:, :, prefix:].chunk(2, dim=-1)
    turned = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)
    return torch.cat([x[:, :, :prefix], turned], dim=2)


def foveal(q: Tensor, k: Tensor, v: Tensor, angle: Tensor, layout: definition.Layout, *, centred: bool) -> Tensor:
    """Foveal attention of the patches, computed with a dense mask; `centred` says how the keys of cells are made."""
    scale, sharp_q, sharp_k = q.shape[-1] ** -0.5, rotate(q, angle), rotate(k, angle)

    def blurred(x: Tensor, size: int, count: int) -> Tensor:
        block = definition.block_of(layout, size)
        if not centred:
            return definition.blur(rotate(x, angle)[:, :, 1:], block, count)[0]
        middle = definition.blur(angle[None, None], block, count)[0][0, 0]
        return rotate(definition.blur(x[:, :, 1:], block, count)[0], middle)

    cells, tiles = layout.cells, layout.tiles
    score = scale * blurred(q, layout.tile, tiles) @ blurred(k, layout.cell, cells).transpose(-2, -1)
    score = score.masked_fill(definition.own_cells(layout), torch.inf)
    chosen = score.argsort(dim=-1, descending=True)[..., : layout.budget]
    sharp = torch.zeros_like(score, dtype=torch.bool).scatter(3, chosen, True)
    sharp = sharp[:, :, definition.block_of(layout, layout.tile)[0]]  # by query
    of_patch = definition.block_of(layout, layout.cell)[0]
    seen = [(sharp_k[:, :, :1], v[:, :, :1], sharp.new_ones(*sharp.shape[:3], 1), torch.zeros(1))]
    seen.append((sharp_k[:, :, 1:], v[:, :, 1:], sharp[..., of_patch], torch.zeros(layout.patches)))
    levels = [(layout.cell, cells, ~sharp)]
    if layout.coarse:
        parent = definition.parent_of(layout)
        touched = torch.zeros(*sharp.shape[:3], layout.coarse_cells).index_add(3, parent, sharp.float()) > 0
        levels = [(layout.cell, cells, ~sharp & touched[..., parent]), (layout.coarse, layout.coarse_cells, ~touched)]
    for size, count, visible in levels:
        mean, log_count = definition.blur(v[:, :, 1:], definition.block_of(layout, size), count)
        seen.append((blurred(k, size, count), mean, visible, log_count[0]))
    keys, values, visible, bias = (
        torch.cat(parts, dim=d) for parts, d in zip(zip(*seen, strict=True), (2, 2, 3, 0), strict=True)
    )
    mask = torch.where(visible, bias, -torch.inf)
    return F.scaled_dot_product_attention(sharp_q[:, :, 1:], keys, values, attn_mask=mask, scale=scale)


def cosine(ours: Tensor, exact: Tensor) -> float:
    """Mean cosine similarity of the patches, over the channels of all heads."""
    a, b = (t.transpose(1, 2).flatten(2) for t in (ours, exact[:, :, 1:]))
    return float(F.cosine_similarity(a, b, dim=-1).mean())


if __name__ == "__main__":
    main()
