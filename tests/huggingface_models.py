"""Hugging Face's vision models, tiny, from their configurations with random weights: one entry for each family."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
IMAGE = {"image_size": 64, "patch_size": 8}
#: The sizes a model is run at: its own, and one with as many patches in another shape.
SIZES = ((64, 64), (32, 128))


@dataclasses.dataclass(frozen=True)
class Tiny:
    """How to build a model (for images of a size), what it takes, and whether it takes any size."""

    make: Callable[..., Any]
    feed: Callable[[int, int], dict[str, Any]]
    any_size: bool = True
    needs: str | None = None

    def cases(self) -> list[tuple[Any, tuple[int, int]]]:
        """Models, each with the size to run it at: one model for all, or one made for each."""
        if self.any_size:
            model = self.make()
            return [(model, size) for size in SIZES]
        return [(self.make(image_size=list(size)), size) for size in SIZES]

    def inputs(self, model: Any, size: tuple[int, int]) -> dict[str, Any]:
        torch.manual_seed(1)
        asked = self.any_size and "interpolate_pos_encoding" in inspect.signature(model.forward).parameters
        return {**self.feed(*size), **({"interpolate_pos_encoding": True} if asked else {})}


def build(model: str, config: str, **arguments: Any) -> Any:
    """A class of transformers', or of one of its files: `idefics2.Idefics2VisionTransformer`."""
    torch.manual_seed(0)
    folder, _, name = model.rpartition(".")
    home = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}") if folder else transformers
    return random_weights(getattr(home, name)(_config(config, **arguments)))


def _config(name: str, **arguments: Any) -> Any:
    folder, _, name = name.rpartition(".")
    home = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}") if folder else transformers
    return getattr(home, name)(**arguments)


def random_weights(model: Any) -> Any:
    """Large enough that what attention does can be seen in the outputs."""
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(0.2 * torch.randn_like(value) + (value.ndim == 1))
    return model.eval()


def image(height: int, width: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, height, width)}


def patches(height: int, width: int) -> dict[str, Any]:
    """As Siglip 2 takes them: cut, each image with its shape, and a mask of those that are none."""
    shape = torch.tensor([[height // 8, width // 8]] * 2)
    pixels = torch.randn(2, height // 8 * (width // 8), 3 * 64)
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(pixels.shape[:2]), "spatial_shapes": shape}


def words(height: int, width: int) -> dict[str, Any]:
    return {**image(height, width), "input_ids": torch.arange(12).view(2, 6)}


def frames(height: int, width: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(1, 4, 3, height, width)}


def clips(height: int, width: int) -> dict[str, Any]:
    return {"pixel_values_videos": torch.randn(1, 4, 3, height, width), "skip_predictor": True}


def tiny(
    model: str, config: str, feed: Any = image, any_size: bool = True, needs: str | None = None, **more: Any
) -> Tiny:
    return Tiny(lambda **size: build(model, config, **{**TINY, **IMAGE, **more, **size}), feed, any_size, needs)


def eomt(model: str, config: str) -> Tiny:
    """As it is used once it is trained: without masks."""

    def make() -> Any:
        made = build(model, config, **TINY, **IMAGE, num_blocks=1, num_queries=6)
        made.attn_mask_probs.zero_()
        return made

    return Tiny(make, image, needs="scipy")


def two_towers(model: str, config: str) -> Tiny:
    """A vision tower beside a text tower."""
    text = {**TINY, "vocab_size": 99, "max_position_embeddings": 16}
    arguments = {"text_config": text, "vision_config": {**TINY, **IMAGE}, "projection_dim": 32}
    return Tiny(lambda: build(model, config, **arguments), words)


def _dinov2(**more: Any) -> Any:
    return transformers.Dinov2Config(**{**TINY, **IMAGE, "num_hidden_layers": 4}, **more)


def _depth_anything() -> Any:
    sizes = {"reassemble_hidden_size": 32, "neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8, "head_hidden_size": 8}
    backbone = _dinov2(out_indices=[1, 2, 3, 4], reshape_hidden_states=False)
    return build(
        "DepthAnythingForDepthEstimation", "DepthAnythingConfig", backbone_config=backbone, patch_size=8, **sizes
    )


def _sam2() -> Any:
    arguments = {
        "image_size": [64, 64],
        "patch_kernel_size": [7, 7],
        "patch_stride": [4, 4],
        "patch_padding": [3, 3],
        "query_stride": [2, 2],
        "window_positional_embedding_background_size": [4, 4],
        "blocks_per_stage": [1, 2, 3, 1],
        "embed_dim_per_stage": [16, 32, 64, 128],
        "num_attention_heads_per_stage": [1, 2, 4, 8],
        "window_size_per_stage": [4, 4, 4, 2],
        "global_attention_blocks": [2, 5],
        "hidden_size": 16,
    }
    return build("Sam2HieraDetModel", "sam2.Sam2HieraDetConfig", **arguments)


MODELS: dict[str, Tiny] = {
    "vit": tiny("ViTModel", "ViTConfig"),
    "deit": tiny("DeiTModel", "DeiTConfig"),
    "dinov2": tiny("Dinov2Model", "Dinov2Config"),
    "dinov2_with_registers": tiny("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", num_register_tokens=3),
    "dinov3_vit": tiny("DINOv3ViTModel", "DINOv3ViTConfig", num_register_tokens=4),
    "siglip": tiny("SiglipVisionModel", "SiglipVisionConfig"),
    "siglip2": tiny("Siglip2VisionModel", "Siglip2VisionConfig", patches, num_patches=64),
    "clip_vision": tiny("CLIPVisionModel", "CLIPVisionConfig"),
    "clip": two_towers("CLIPModel", "CLIPConfig"),
    "metaclip_2": tiny("MetaClip2VisionModel", "MetaClip2VisionConfig"),
    "ijepa": tiny("IJepaModel", "IJepaConfig"),
    "vit_msn": tiny("ViTMSNModel", "ViTMSNConfig"),
    "yolos": tiny("YolosModel", "YolosConfig", image_size=[64, 64], num_detection_tokens=5),
    "owlvit": tiny("OwlViTVisionModel", "OwlViTVisionConfig"),
    "owlv2": tiny("Owlv2VisionModel", "Owlv2VisionConfig"),
    "aimv2": tiny("Aimv2VisionModel", "Aimv2VisionConfig"),
    "mlcd": tiny("MLCDVisionModel", "MLCDVisionConfig"),
    "pixio": tiny("PixioModel", "PixioConfig", n_cls_tokens=3),
    "sapiens2": tiny("Sapiens2Model", "Sapiens2Config"),
    "dpt": tiny("DPTModel", "DPTConfig"),
    "eomt": eomt("EomtForUniversalSegmentation", "EomtConfig"),
    "eomt_dinov3": eomt("EomtDinov3ForUniversalSegmentation", "EomtDinov3Config"),
    "vitpose": tiny(
        "VitPoseBackbone",
        "VitPoseBackboneConfig",
        image_size=[64, 64],
        patch_size=[8, 8],
        out_indices=[2],
        any_size=False,
    ),
    "internvl": tiny("InternVLVisionModel", "InternVLVisionConfig", image_size=[64, 64], patch_size=[8, 8]),
    "janus": tiny("JanusVisionModel", "JanusVisionConfig"),
    "chinese_clip": tiny("ChineseCLIPVisionModel", "ChineseCLIPVisionConfig"),
    "altclip": tiny("AltCLIPVisionModel", "AltCLIPVisionConfig"),
    "clipseg": tiny("CLIPSegVisionModel", "CLIPSegVisionConfig"),
    "git": tiny("GitVisionModel", "GitVisionConfig"),
    "blip_2": tiny("Blip2VisionModel", "Blip2VisionConfig"),
    "instructblip": tiny("InstructBlipVisionModel", "InstructBlipVisionConfig"),
    "tipsv2": tiny("Tipsv2VisionModel", "Tipsv2VisionConfig"),
    "idefics2": tiny("idefics2.Idefics2VisionTransformer", "idefics2.Idefics2VisionConfig"),
    "idefics3": tiny("idefics3.Idefics3VisionTransformer", "idefics3.Idefics3VisionConfig"),
    "smolvlm": tiny("smolvlm.SmolVLMVisionTransformer", "smolvlm.SmolVLMVisionConfig"),
    "kosmos2": tiny("kosmos2.Kosmos2VisionModel", "kosmos2.Kosmos2VisionConfig"),
    "ovis2": tiny("ovis2.Ovis2VisionModel", "ovis2.Ovis2VisionConfig"),
    "depth_anything": Tiny(_depth_anything, image),
    "sam2": Tiny(_sam2, image),
    "sam3": tiny(
        "sam3.Sam3ViTModel", "sam3.Sam3ViTConfig", window_size=4, global_attn_indexes=[1], pretrain_image_size=32
    ),
    "vivit": tiny("VivitModel", "VivitConfig", frames, num_frames=4, tubelet_size=[2, 8, 8], any_size=False),
    "videomae": tiny("VideoMAEModel", "VideoMAEConfig", frames, num_frames=4, any_size=False),
    "vjepa2": tiny("VJEPA2Model", "VJEPA2Config", clips, crop_size=64, frames_per_clip=4, any_size=False),
}
