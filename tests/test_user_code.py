"""What users add to a model is kept by a conversion or refused: hooks, replaced methods, adapters, quantised layers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import attendless
from attendless import UserError


def vit() -> Any:
    torch.manual_seed(0)
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 3, "depth": 3, "num_classes": 5}
    return VisionTransformer(**shape).eval()


def xcit() -> Any:
    return timm.create_model("xcit_nano_12_p16_224", img_size=64, num_classes=5).eval()


def kept(model: nn.Module, spec: str = "foveal:keep=0.5") -> nn.Module:
    return attendless.convert(model, spec, below_breakeven="keep")


# Hooks and replaced methods ------------------------------------------------------------------------------------------

PLACES = ("", "blocks.1", "blocks.1.attn", "blocks.1.attn.qkv", "blocks.1.mlp.fc1", "patch_embed", "norm", "head")


@pytest.mark.parametrize("place", PLACES)
def test_a_hook_that_a_rebuilt_model_would_lose_is_refused(place: str) -> None:
    model = vit()
    handle = model.get_submodule(place).register_forward_hook(lambda module, given, out: 1.5 * out)
    with pytest.raises(UserError, match=rf"{place or 'this VisionTransformer'} has a forward hook, .* remove it"):
        attendless.convert(model, "full")
    handle.remove()
    attendless.convert(model, "full")


@pytest.mark.parametrize("place", PLACES)
def test_a_forward_that_a_rebuilt_model_would_lose_is_refused(place: str) -> None:
    model = vit()
    module = model.get_submodule(place)
    own = module.forward
    module.forward = lambda *args, **kwargs: 1.5 * own(*args, **kwargs)
    with pytest.raises(UserError, match="has a `forward` of its own"):
        attendless.convert(model, "full")


def test_other_methods_count_too() -> None:
    model = vit()
    model.forward_features = lambda x: torch.zeros(len(x), 17, 24)
    with pytest.raises(UserError, match="has a `forward_features` of its own in place of that of VisionTransformer"):
        attendless.convert(model, "full")


def test_patch_keeps_hooks_and_replaced_methods() -> None:
    model, images = vit(), torch.randn(2, 3, 32, 32)
    model.blocks[1].attn.register_forward_hook(lambda module, given, out: 1.5 * out)
    own = model.blocks[2].mlp.forward
    model.blocks[2].mlp.forward = lambda x: 1.5 * own(x)
    expected = model(images)
    attendless.patch(model, "full", below_breakeven="keep")
    torch.testing.assert_close(model(images), expected)


def test_patch_refuses_an_attention_that_would_not_run() -> None:
    model = vit()
    attention = model.blocks[1].attn
    attention.forward = attention.forward
    with pytest.raises(UserError, match=r"blocks\.1 has a `forward` of its own"):
        attendless.patch(model, "foveal:keep=0.5", below_breakeven="keep")
    assert attendless.unpatch(model) == 0, "the layers before were put back"


@pytest.mark.parametrize("place", ["blocks.1", "blocks.1.attn", "blocks.1.attn.qkv"])
def test_a_hook_in_an_exchanged_block_is_refused(place: str) -> None:
    model = xcit()
    model.get_submodule(place).register_forward_hook(lambda module, given, out: out)
    with pytest.raises(UserError, match=f"{place} has a forward hook"):
        kept(model)


def test_hooks_outside_of_what_is_exchanged_are_copied() -> None:
    model, images = xcit(), torch.randn(1, 3, 64, 64)
    before = attendless.convert(model, "xca")(images)
    model.blocks[1].mlp.register_forward_hook(lambda module, given, out: 5 * out)
    model.head.register_forward_hook(lambda module, given, out: out + 1)
    after = attendless.convert(model, "xca")(images)
    torch.testing.assert_close(after, model(images), atol=1e-4, rtol=1e-4)
    assert (after - before).abs().min() > 0.5


def test_a_hook_on_an_attention_of_a_backbone_is_refused() -> None:
    backbone = attendless.convert(vit(), "full")
    backbone.blocks[0].attn.register_forward_pre_hook(lambda module, given: None)
    with pytest.raises(UserError, match=r"blocks\.0\.attn has a forward pre-hook"):
        kept(backbone)


# Other projections ---------------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """LoRA as peft writes it; it states the widths of its layer, or does not."""

    def __init__(self, base: nn.Linear, stated: bool) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        if stated:
            self.in_features, self.out_features = base.in_features, base.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Inherited(nn.Linear):
    """LoRA as a subclass of the layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features)
        self.down = nn.Parameter(torch.randn(2, base.in_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (x @ self.down.mT).sum(-1, keepdim=True)


WRAPPERS = {"stated": lambda x: Adapter(x, True), "unstated": lambda x: Adapter(x, False), "inherited": Inherited}


def adapted(model: Any, wrapper: str) -> Any:
    for block in model.blocks:
        block.attn.qkv = WRAPPERS[wrapper](block.attn.qkv)
    return model


@pytest.mark.parametrize("build", [vit, xcit])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_adapters_on_a_projection_are_refused_by_name(build: Any, wrapper: str) -> None:
    with pytest.raises(UserError, match=r"blocks\.0\.attn\.qkv is a \S+\.(Adapter|Inherited): .* Merge adapters"):
        kept(adapted(build(), wrapper))


@pytest.mark.parametrize("wrapper", ["stated", "inherited"])
def test_patch_runs_adapters(wrapper: str) -> None:
    model, images = adapted(vit(), wrapper), torch.randn(1, 3, 32, 32)
    expected = model(images)
    attendless.patch(model, "full", below_breakeven="keep")
    torch.testing.assert_close(model(images), expected)


def test_patch_refuses_adapters_whose_widths_are_unknown() -> None:
    with pytest.raises(UserError, match=r"blocks\.0\.attn\.qkv is a \S+\.Adapter"):
        attendless.patch(adapted(vit(), "unstated"), "foveal:keep=0.5")


@pytest.mark.parametrize("how", [kept, lambda model: attendless.patch(model, "foveal:keep=0.5")])
def test_quantised_projections_are_refused_by_name(how: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, about its own module
        model = torch.ao.quantization.quantize_dynamic(vit(), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(UserError, match=r"attn\.qkv is a torch\.ao\.\S+\.Linear: .* quantise after converting"):
        how(model)


# Specs of other types ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [5, b"full", ["full"] * 3, ("full",), True, {}])
@pytest.mark.parametrize("how", [attendless.convert, attendless.patch])
def test_a_spec_that_is_no_text_is_refused_with_its_type(how: Any, spec: Any) -> None:
    with pytest.raises(UserError, match=rf"attention was given as {type(spec).__name__}, .*: expected a text such as"):
        how(vit(), spec)


@pytest.mark.parametrize("spec", [5, b"tome:r=8", ["tome:r=8"]])
def test_a_token_reducer_that_is_no_text_is_refused_with_its_type(spec: Any) -> None:
    with pytest.raises(UserError, match=rf"token reducer was given as {type(spec).__name__}"):
        attendless.convert(vit(), "full", tokens=spec)
