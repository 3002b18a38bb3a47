"""The map that is shown is the map that was used, for every registered attention and by every backend: what a layer
really put out in its forward is that map times the values it really had.

One set of values could fit by chance, so the values are exchanged, with queries and keys left alone, until they span
all tokens. Differences of two runs are compared, so that a constant in the output does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import timm
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attendless import Context, UserError, compiled, convert
from attendless.attention import Grid, attentions
from attendless.check.attention_trial import AttentionTrial
from attendless.check.attentions import others
from attendless.check.trial import Place
from attendless.integrations.timm_inplace.adapted import adapted_modules
from attendless.maps import layers, maps, numbers
from attendless.sparse import execution

#: Those in which no token looks at another: what they show instead is said where they define `map`.
NO_MAP = {"fastformer", "xca"}
SPECS = [spec for name, cls in attentions().items() if name not in NO_MAP for spec in cls.examples or (name,)]
CASES = [(spec, backend) for spec in SPECS for backend in ("", *others(spec))]
PLACES = [Place(Grid(4, 5, 1)), Place(Grid(6, 6, 0)), Place(Grid(6, 6, 1))]


@contextmanager
def noted(attention: Any) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The values that `attend` is called with inside, and what it makes of them."""
    seen: list[tuple[Tensor, Tensor]] = []
    attend = attention.attend

    def noting(q: Tensor, k: Tensor, v: Tensor, where: Context | Grid) -> Any:
        made = attend(q, k, v, where)
        seen.append((v, made[0] if isinstance(where, Context) else made))
        return made

    attention.attend = noting
    yield seen
    del attention.attend


def really(trial: AttentionTrial) -> tuple[Tensor, Tensor]:
    with noted(trial.module) as seen:
        trial.module(trial.x, trial.context)
    (found,) = seen
    return found


def other_values(trial: AttentionTrial) -> None:
    """Give the layer other values, and leave its queries and keys alone."""
    rows = trial.module.attn_dim
    for parameter in (trial.module.qkv.weight, trial.module.qkv.bias):
        parameter[-rows:] = torch.randn_like(parameter[-rows:])
    trial.module.qkv.weight[-rows:] /= trial.module.dim**0.5


@pytest.mark.parametrize(("spec", "backend"), CASES)
@torch.no_grad()
def test_the_output_is_the_map_times_the_values(spec: str, backend: str) -> None:
    tried = 0
    for place in PLACES:
        try:
            trial = AttentionTrial(spec, place, batch=2)
        except UserError:  # the attention refuses this grid
            continue
        pool = getattr(trial.module.options, "pool", 0)
        if pool and (place.grid.height % pool or place.grid.width % pool):  # keys are made of patches that overlap
            continue
        if backend and backend not in [one.name for one in trial.backends()]:
            continue
        tried += 1
        with trial.computed_by(backend):
            shown = trial.module.map(trial.x, trial.context)
            v, out = really(trial)
            for _ in range(-(-trial.grid.tokens // v.shape[-1]) + 1):
                other_values(trial)
                values, changed = really(trial)
                expected = on_keys(shown, trial.grid, trial.module.options, v.shape[2]) @ (values - v)
                worst = (changed - out - expected).abs().max() / expected.abs().max()
                assert worst < 1e-6
    assert tried


def on_keys(shown: Tensor, grid: Grid, options: Any, keys: int) -> Tensor:
    """A map over tokens, summed over the tokens that each key was made of."""
    if keys == grid.tokens:
        return shown
    image = shown[..., grid.prefix :].unflatten(-1, (grid.height, grid.width))
    ratio = grid.height // options.pool if getattr(options, "pool", 0) else options.ratio
    rows, columns = max(1, grid.height // ratio), max(1, grid.width // ratio)
    blocks = image[..., : rows * ratio, : columns * ratio]
    blocks = blocks.unflatten(-1, (columns, -1)).unflatten(-3, (rows, -1)).sum((-1, -3))
    return torch.cat([shown[..., : grid.prefix], blocks.flatten(-2)], dim=-1)


SMALL = {"depth": 2, "embed_dim": 96, "num_heads": 3, "num_classes": 5}
SAM = {**SMALL, "window_size": 3, "global_attn_indexes": (1,), "img_size": 96}
SWIN = {"depths": (2, 2), "num_heads": (2, 4), "embed_dim": 32, "img_size": 112, "window_size": 7}
PYRAMID = {"embed_dims": (16, 32), "depths": (2, 2), "num_heads": (1, 2), "img_size": 32, "num_classes": 5}
#: A model's name, its arguments, an image's size, and what it is to attend with.
MODELS = [
    ("vit_small_patch16_224", {**SMALL, "img_size": 64}, 64, "full"),
    ("vit_small_patch16_224", {**SMALL, "img_size": 64}, 64, "performer"),
    ("vit_small_patch16_224", {**SMALL, "img_size": 64}, 64, "lavit:vanilla=1"),
    ("vit_small_patch16_dinov3", SMALL, 96, "full"),
    ("vit_small_patch16_dinov3", SMALL, 96, "foveal:keep=0.3,cell=2,tile=1"),
    ("eva02_tiny_patch14_224", {**SMALL, "img_size": 84}, 84, "foveal:keep=0.3,cell=2,tile=1"),
    ("samvit_base_patch16", SAM, 96, "full"),
    ("samvit_base_patch16", SAM, 96, "foveal:keep=0.3,cell=2,tile=1"),
    ("swin_tiny_patch4_window7_224", SWIN, 112, "foveal:keep=0.2"),
    ("pvt_v2_b0", {"depths": (1, 1, 1, 1)}, 224, "foveal:keep=0.2/foveal:keep=0.2/full/full"),
    ("xcit_nano_12_p16_224", {"depth": 2, "embed_dim": 32}, 224, "window:size=7"),
    ("pyramid_fair_patch4_224", PYRAMID, 32, "window:size=2/full"),
    ("lavit_tiny", {"img_size": 64}, 64, None),
]


@pytest.mark.parametrize(("name", "arguments", "size", "spec"), MODELS)
@torch.no_grad()
def test_in_models_of_every_kind(name: str, arguments: dict, size: int, spec: str | None) -> None:
    model = timm.create_model(name, **arguments).eval()
    if spec is not None:
        model = convert(model, spec, below_breakeven="keep")
    images = torch.randn(2, 3, size, size)
    known = layers(model)
    holders = {module.core: module for _, module in adapted_modules(model)}  # whose `attend` has the last word
    seen = {}
    with ExitStack() as stack:
        for number in numbers(model, None):
            seen[number] = stack.enter_context(noted(holders.get(known[number], known[number])))
        model(images)
    found = maps(model, images)
    assert [one.layer for one in found] == list(seen)
    for one in found:
        ((v, out),) = seen[one.layer]
        shown = on_keys(one.weights, one.grid, known[one.layer].options, v.shape[2])
        assert (shown @ v - out).abs().max() < 1e-6 * max(1.0, float(out.abs().max()))
        assert one.on_grid().shape[-2:] == (one.grid.height, one.grid.width)


def test_after_merging() -> None:
    dense = timm.create_model("vit_small_patch16_224", **SMALL, img_size=64).eval()
    model = convert(dense, "full", tokens="tome:r=3")
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad(), noted(layers(model)[1]) as seen:
        model.forward_features(images)  # for an answer the last layer need not be asked about patches
    ((v, out),) = seen
    (one,) = maps(model, images, 1)
    assert one.weights.shape[-1] == 1 + 16 - 3
    torch.testing.assert_close(one.weights @ v, out, atol=1e-6, rtol=1e-6)


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return made


@pytest.mark.parametrize("spec", ["full", "performer", "linformer", "efficient", "reduced:ratio=4", "foveal:keep=0.05"])
def test_one_query_never_makes_the_whole_map(spec: str) -> None:
    shape = {"embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}
    dense = timm.create_model("vit_small_patch16_224", img_size=512, **shape).eval()
    model = convert(dense, spec, below_breakeven="keep")
    image = torch.randn(1, 3, 512, 512)
    tokens = 1 + 32 * 32
    if spec.startswith("foveal") and not compiled.available:
        pytest.skip("plain PyTorch masks dense products")
    with execution("native" if spec.startswith("foveal") else "off"), Largest() as largest:
        found = maps(model, image, query=(100, 100))
    assert [tuple(one.weights.shape) for one in found] == 3 * [(1, 2, 1, tokens)]
    assert largest.numbers < tokens * tokens / 2, "of one head of one layer"
    with Largest() as whole:
        maps(model, image, 0)
    assert whole.numbers >= 2 * tokens * tokens, "the measure can fail"
