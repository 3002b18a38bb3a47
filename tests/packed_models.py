"""Towers that pack images, or hold their patches in blocks, tiny, from their configurations with random weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from huggingface_models import build

#: frames, height and width of images, in patches; multiples of four, as towers that merge twice require.
Image = tuple[int, int, int]
PATCH = 4
#: Three images of different sizes; two of them have the same number of patches. A video follows where a tower takes it.
IMAGES: tuple[Image, ...] = ((1, 8, 12), (1, 4, 8), (1, 12, 8))
WITH_VIDEO: tuple[Image, ...] = (*IMAGES, (2, 4, 8))
VIDEOS: tuple[Image, ...] = ((2, 8, 12), (2, 4, 8), (2, 12, 8))
CHANNELS = {"hidden_size": 32, "intermediate_size": 64}
LAYERS = {"num_hidden_layers": 3, "num_attention_heads": 2}
DEPTH = {"depth": 3, "num_heads": 2}


@dataclasses.dataclass(frozen=True)
class Packed:
    """A tower.

    make: builds it
    feed: pixels of images and their sizes → the tower's arguments
    images: what it receives in one row
    """

    make: Callable[[], Any]
    feed: Callable[[list[Tensor], Sequence[Image]], dict[str, Any]]
    images: tuple[Image, ...] = IMAGES

    def inputs(self, images: Sequence[Image], pixels: list[Tensor] | None = None) -> dict[str, Any]:
        return self.feed(pixels or draw(images), images)


def draw(images: Sequence[Image], seed: int = 1) -> list[Tensor]:
    """Random images [frames, 3, height, width] in pixels."""
    torch.manual_seed(seed)
    return [torch.randn(t, 3, PATCH * h, PATCH * w) for t, h, w in images]


def positions(height: int, width: int, blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Row and column of the patches in nested blocks, by plain loops."""

    def walk(top: int, left: int, bottom: int, right: int, sides: Sequence[int]) -> list[tuple[int, int]]:
        side, *rest = sides or (1,)
        starts = [(y, x) for y in range(top, bottom, side) for x in range(left, right, side)]
        if not sides:
            return starts
        return [at for y, x in starts for at in walk(y, x, min(y + side, bottom), min(x + side, right), rest)]

    return walk(0, 0, height, width, blocks)


def patches(pixels: Tensor, image: Image, blocks: Sequence[int]) -> Tensor:
    """[frames, 3, H, W] → [frames · height · width, 3, PATCH, PATCH], in the order of nested blocks."""
    rows = [
        frame[:, PATCH * y : PATCH * (y + 1), PATCH * x : PATCH * (x + 1)]
        for frame in pixels
        for y, x in positions(image[1], image[2], blocks)
    ]
    return torch.stack(rows)


def grid_thw(pixels: list[Tensor], images: Sequence[Image]) -> dict[str, Any]:
    """As Qwen's towers take images: flattened patches of two equal frames, in blocks of 2 × 2, and a grid per image."""
    found = [patches(x, image, (2,)) for x, image in zip(pixels, images, strict=True)]
    flat = torch.cat(found)[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1)
    return {"hidden_states": flat, "grid_thw": torch.tensor(images)}


def kimi(pixels: list[Tensor], images: Sequence[Image]) -> dict[str, Any]:
    found = [patches(x, image, ()) for x, image in zip(pixels, images, strict=True)]
    return {"pixel_values": torch.cat(found), "grid_thw": torch.tensor(images)}


def pixtral(pixels: list[Tensor], images: Sequence[Image]) -> dict[str, Any]:
    height, width = (PATCH * max(image[i] for image in images) for i in (1, 2))
    batch = torch.zeros(len(images), 3, height, width)
    for i, x in enumerate(pixels):
        batch[i, :, : x.shape[2], : x.shape[3]] = x[0]
    return {"pixel_values": batch, "image_sizes": torch.tensor([[PATCH * h, PATCH * w] for _, h, w in images])}


def minicpm(pixels: list[Tensor], images: Sequence[Image]) -> dict[str, Any]:
    found = [patches(x, image, ()) for x, image in zip(pixels, images, strict=True)]
    strip = torch.cat(found).permute(1, 2, 0, 3).flatten(2)  # one row of patches
    return {"pixel_values": strip[None], "target_sizes": torch.tensor([image[1:] for image in images])}


def radio(pixels: list[Tensor], images: Sequence[Image]) -> dict[str, Any]:
    found = [patches(x, image, ()) for x, image in zip(pixels, images, strict=True)]
    return {"pixel_values": torch.cat(found).flatten(1), "image_grid_hw": torch.tensor([i[1:] for i in images])}


def qwen(model: str, config: str, images: tuple[Image, ...] = WITH_VIDEO, **more: Any) -> Packed:
    sizes = {"patch_size": PATCH, "temporal_patch_size": 2, "spatial_merge_size": 2}
    return Packed(lambda: build(model, config, **{**DEPTH, **sizes, **more}), grid_thw, images)


QWEN3 = {**CHANNELS, "out_hidden_size": 32, "deepstack_visual_indexes": [1], "num_position_embeddings": 16}
QWEN25 = {**CHANNELS, "out_hidden_size": 32, "fullatt_block_indexes": [1], "window_size": 4 * PATCH}
GLM = {**CHANNELS, "out_hidden_size": 32, "image_size": 8 * PATCH}
MINICPM = {**CHANNELS, **LAYERS, "image_size": 8 * PATCH, "patch_size": PATCH, "insert_layer_id": 1}


def _minicpm(number: str) -> Packed:
    names = f"minicpmv{number}.MiniCPMV{number}VisionModel", f"minicpmv{number}.MiniCPMV{number}VisionConfig"
    return Packed(lambda: build(*names, **MINICPM), minicpm)


def _radio() -> Any:
    sizes = {"patch_size": PATCH, "image_size": 8 * PATCH, "max_img_size": 8 * PATCH, "patch_dim": 3 * PATCH**2}
    return build("RadioModel", "RadioConfig", **LAYERS, hidden_size=32, mlp_ratio=2.0, **sizes)


def _kimi() -> Any:
    sizes = {"pos_emb_height": 8, "pos_emb_width": 8, "patch_size": PATCH}
    return build("kimi_k25.Kimi_K25VisionModel", "kimi_k25.Kimi_K25VisionConfig", **CHANNELS, **LAYERS, **sizes)


def _pixtral() -> Any:
    sizes = {"image_size": 16 * PATCH, "patch_size": PATCH}
    return build("PixtralVisionModel", "PixtralVisionConfig", **CHANNELS, **LAYERS, **sizes)


PACKED: dict[str, Packed] = {
    "qwen2_vl": qwen(
        "qwen2_vl.Qwen2VisionTransformerPretrainedModel", "qwen2_vl.Qwen2VLVisionConfig", embed_dim=32, hidden_size=32
    ),
    "qwen2_5_vl": qwen(
        "qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel", "qwen2_5_vl.Qwen2_5_VLVisionConfig", **QWEN25
    ),
    "qwen2_5_omni": qwen(
        "qwen2_5_omni.Qwen2_5OmniVisionEncoder", "qwen2_5_omni.Qwen2_5OmniVisionEncoderConfig", **QWEN25
    ),
    "qwen3_vl": qwen("qwen3_vl.Qwen3VLVisionModel", "qwen3_vl.Qwen3VLVisionConfig", **QWEN3),
    "qwen3_vl_moe": qwen("qwen3_vl_moe.Qwen3VLMoeVisionModel", "qwen3_vl_moe.Qwen3VLMoeVisionConfig", **QWEN3),
    "qwen3_omni_moe": qwen(
        "qwen3_omni_moe.Qwen3OmniMoeVisionEncoder", "qwen3_omni_moe.Qwen3OmniMoeVisionEncoderConfig", **QWEN3
    ),
    "qwen3_5": qwen("qwen3_5.Qwen3_5VisionModel", "qwen3_5.Qwen3_5VisionConfig", **QWEN3),
    "qwen3_5_moe": qwen("qwen3_5_moe.Qwen3_5MoeVisionModel", "qwen3_5_moe.Qwen3_5MoeVisionConfig", **QWEN3),
    "glm4v": qwen("glm4v.Glm4vVisionModel", "glm4v.Glm4vVisionConfig", IMAGES, **GLM),
    "glm4v_moe": qwen("glm4v_moe.Glm4vMoeVisionModel", "glm4v_moe.Glm4vMoeVisionConfig", IMAGES, **GLM),
    "kimi_k25": Packed(_kimi, kimi, VIDEOS),
    "pixtral": Packed(_pixtral, pixtral),
    "minicpmv4_6": _minicpm("4_6"),
    "minicpmv4_7": _minicpm("4_7"),
    "radio": Packed(_radio, radio),
}


def divided(model: str, config: str, **more: Any) -> Callable[[], Any]:
    """A detector's tower whose tokens are held in 2 × 2 windows; its middle layer attends to all of them."""
    sizes = {"image_size": 8 * PATCH, "patch_size": PATCH, "out_indices": [1, 3]}
    return lambda: build(model, config, **LAYERS, hidden_size=32, **sizes, **more)


DIVIDED: dict[str, Callable[[], Any]] = {
    "rf_detr": divided(
        "rf_detr.RfDetrDinov2Backbone", "rf_detr.RfDetrDinov2Config", num_windows=2, window_block_indexes=[0, 2]
    ),
    "lw_detr": divided("LwDetrViTBackbone", "LwDetrViTConfig", num_windows=4, window_block_indices=[0, 2]),
}
