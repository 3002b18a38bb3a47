"""The table of model families: how `convert` and `patch` serve each one, or why they refuse it.

Every integration reads this table, and `python docs/make_support.py` writes docs/support.md from it. A family of
Hugging Face models whose attention goes through transformers' `AttentionInterface` needs one row here, or one call of
`register_family` in a plug-in file. `convert` and `patch` then serve it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

from torch import nn

from ..errors import UserError
from ..plugins import remember_source
from .token_order import Order, by_divisions, by_merged, by_rows, by_swapped_divisions, by_windows_of_merged

#: A number of tokens: an integer, or a sum of integers and attributes of the configuration: "1 + num_register_tokens".
Count = int | str


@dataclasses.dataclass(frozen=True)
class Family:
    """One row of the table.

    name: what users call the family; for transformers, the model type
    library: "timm", "segment_anything", "transformers" or "plug-in"
    attention: names of the attention classes; for timm with their module
    models: names of the model classes that are served as a whole, with their module for timm
    convert, patch: the integration that serves the family; empty if none does
    refused: why no integration serves the family
    prefix: tokens in front of the patches, or a tuple of the numbers that are possible
    suffix: tokens behind the patches
    own_grid: the attention receives [B, height, width, C], without other tokens
    turn: largest angle in radians by which rotary positions turn a key from one patch to the next, on every grid
    embedding: class of the patch embedding, where that is not a convolution
    sizes: for towers that pack images into one row, the argument of the tower that holds the size of each image
    joined: the frames of a packed video attend to each other
    halved: some layers of a packed tower receive tokens of 2 × 2 patches
    own_mask: the tower makes a mask that keeps packed images apart, and accepts no other
    order: the order of the patches of an image
    global_layers, window_layers: attribute of the configuration with the numbers of the layers that attend to all
        tokens, or in windows; empty: all layers attend to all tokens
    parts: attribute of the configuration with the number of windows of a side, each of which has the prefix
    """

    name: str
    library: str = "transformers"
    attention: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    convert: str = "hf_interface"
    patch: str = "hf_interface"
    refused: str = ""
    prefix: Count | tuple[Count, ...] = 0
    suffix: Count = 0
    own_grid: bool = False
    turn: float = 0.0
    embedding: str = ""
    sizes: str = ""
    joined: bool = False
    halved: bool = False
    own_mask: bool = False
    order: Order = by_rows
    global_layers: str = ""
    window_layers: str = ""
    parts: str = ""

    def prefixes(self, config: Any) -> tuple[int, ...]:
        """The possible numbers of tokens in front of the patches of a model with this configuration."""
        counts = self.prefix if isinstance(self.prefix, tuple) else (self.prefix,)
        return tuple(_count(count, config) for count in counts)

    def part_count(self, config: Any) -> int:
        """The number of parts of an image that have the prefix each."""
        return int(getattr(config, self.parts)) ** 2 if self.parts else 1

    def suffixes(self, config: Any) -> int:
        """The number of tokens behind the patches of a model with this configuration."""
        return _count(self.suffix, config)


def _count(count: Count, config: Any) -> int:
    terms = [term.strip() for term in str(count).split("+")]
    return sum(int(term) if term.isdigit() else int(getattr(config, term)) for term in terms)


def _timm(name: str, models: str, attention: str = "", convert: str = "timm_inplace", patch: str = "") -> Family:
    return Family(name, "timm", tuple(attention.split()), tuple(models.split()), convert, patch)


def _refused(name: str, reason: str, attention: str, library: str = "transformers", models: str = "") -> Family:
    return Family(name, library, tuple(attention.split()), tuple(models.split()), "", "", reason)


def _hf(name: str, attention: str, prefix: Count | tuple[Count, ...] = 0, **more: Any) -> Family:
    return Family(name, attention=(attention,), prefix=prefix, **more)


def _packed(name: str, attention: str, sizes: str = "grid_thw", order: Order = by_merged, **more: Any) -> Family:
    """A tower that packs images; those with `grid_thw` rotate keys by up to one radian per patch."""
    turn = 1.0 if sizes in ("grid_thw", "image_sizes") else 0.0
    return Family(name, attention=tuple(attention.split()), sizes=sizes, order=order, turn=turn, **more)


def _rebuilt(name: str, attention: str, prefix: Count, models: str) -> Family:
    return _hf(name, attention, prefix, models=tuple(models.split()), convert="rebuild")


def _sam(name: str, attention: str, encoder: str) -> Family:
    """The attention of these models does not go through `AttentionInterface`."""
    return _hf(name, attention, models=(encoder,), convert="timm_inplace", patch="timm_inplace")


_IN_PLACE = {"convert": "timm_inplace", "patch": "timm_inplace"}
_REGISTERS = "1 + num_register_tokens"
#: The last layers of these models also receive the queries, in front of all other tokens.
_QUERIES = (_REGISTERS, f"{_REGISTERS} + num_queries")
_BIAS = "its relative position bias is a number for every pair of tokens, which no attention of attendless takes"
_MASK = "its relative position bias is a mask"
_WINDOWS = "it attends in windows already"
_FEWER = "its keys are fewer than its queries already"
_EAGER = "it computes its scores itself: build the model with attn_implementation='sdpa'"
_CLOSED = "it is not behind transformers' AttentionInterface"

#: Module of SAM's published code that holds its image encoder.
_SAM_CODE = "segment_anything.modeling.image_encoder"

_BUILT_IN: tuple[Family, ...] = (
    _timm(
        "VisionTransformer (ViT, DeiT, DINOv2, CLIP, SigLIP, MAE)",
        "timm.models.vision_transformer.VisionTransformer timm.models.deit.VisionTransformerDistilled",
        "timm.models.vision_transformer.Attention",
        "rebuild",
        "timm_inplace",
    ),
    _timm("Swin", "timm.models.swin_transformer.SwinTransformer", convert="timm_blocks"),
    _timm("PVT v2", "timm.models.pvt_v2.PyramidVisionTransformerV2", convert="timm_blocks"),
    _timm("XCiT", "timm.models.xcit.Xcit", convert="timm_blocks"),
    _timm(
        "Eva (DINOv3, EVA-02, PE), the ViTs of DeepSeek and Qwen3",
        "timm.models.eva.Eva "
        "timm.models.deepseek_vit.DeepseekVitEncoder timm.models.deepseek_vit.DeepseekVitClassifier "
        "timm.models.qwen3_vit.Qwen3VitEncoder timm.models.qwen3_vit.Qwen3VitClassifier",
        "timm.models.eva.EvaAttention timm.layers.AttentionRope",
        **_IN_PLACE,
    ),
    _timm(
        "SAM",
        "timm.models.vision_transformer_sam.VisionTransformerSAM",
        "timm.models.vision_transformer_sam.Attention",
        **_IN_PLACE,
    ),
    _timm(
        "SAM 2's Hiera",
        "timm.models.hieradet_sam2.HieraDet",
        "timm.models.hieradet_sam2.MultiScaleAttention",
        **_IN_PLACE,
    ),
    Family(
        "Segment Anything's published code, and Cellpose-SAM",
        "segment_anything",
        (f"{_SAM_CODE}.Attention",),
        (f"{_SAM_CODE}.ImageEncoderViT",),
        convert="timm_inplace",
        patch="timm_inplace",
    ),
    _refused("BEiT", _BIAS, "timm.models.beit.Attention", "timm"),
    _refused("ViT with relative positions", _BIAS, "timm.models.vision_transformer_relpos.RelPosAttention", "timm"),
    _refused(
        "Hiera (MAE)",
        "its tokens are ordered by the unit they are masked in, not row by row",
        "timm.models.hiera.MaskUnitAttention",
        "timm",
    ),
    _refused("TinyViT (MobileSAM, LiteMedSAM)", _WINDOWS, "timm.models.tiny_vit.Attention", "timm"),
    _refused("NaFlexVit", "the images of a batch have a grid each", "", "timm", "timm.models.naflexvit.NaFlexVit"),
    _rebuilt("vit", "ViTAttention", 1, "ViTModel ViTForImageClassification"),
    _rebuilt("dinov2", "Dinov2Attention", 1, "Dinov2Model"),
    _rebuilt("dinov2_with_registers", "Dinov2WithRegistersAttention", _REGISTERS, "Dinov2WithRegistersModel"),
    _rebuilt("clip", "CLIPAttention", 1, "CLIPVisionModel CLIPVisionModelWithProjection CLIPVisionTransformer"),
    _hf("aimv2", "Aimv2Attention"),
    _hf("altclip", "AltCLIPAttention", 1),
    _hf("blip_2", "Blip2Attention", 1),
    _hf("chinese_clip", "ChineseCLIPVisionAttention", 1),
    _hf("clipseg", "CLIPSegAttention", 1),
    _hf("deit", "DeiTAttention", 2),
    _hf("dinov3_vit", "DINOv3ViTAttention", _REGISTERS),
    _hf("dpt", "DPTSelfAttention", 1),
    _hf("eomt", "EomtAttention", _QUERIES),
    _hf("eomt_dinov3", "EomtDinov3Attention", _QUERIES),
    _hf("git", "GitVisionAttention", 1),
    _hf("idefics2", "Idefics2VisionAttention"),
    _hf("idefics3", "Idefics3VisionAttention"),
    _hf("ijepa", "IJepaAttention"),
    _hf("instructblip", "InstructBlipAttention", 1),
    _hf("internvl", "InternVLVisionAttention", 1),
    _hf("janus", "JanusVisionAttention"),
    _hf("kosmos2", "Kosmos2VisionAttention", 1),
    _hf("metaclip_2", "MetaClip2Attention", 1),
    _hf("mlcd", "MLCDAttention", 1, turn=1.0),
    _hf("ovis2", "Ovis2VisionAttention"),
    _hf("owlv2", "Owlv2Attention", 1),
    _hf("owlvit", "OwlViTAttention", 1),
    _hf("pixio", "PixioAttention", "n_cls_tokens"),
    _sam("sam", "SamVisionSdpaAttention", "SamVisionEncoder"),
    _sam("sam_hq", "SamHQVisionSdpaAttention", "SamHQVisionEncoder"),
    _hf("sam2", "Sam2MultiScaleAttention", own_grid=True),
    _hf("sam3", "Sam3ViTRoPEAttention", own_grid=True),
    _hf("sapiens2", "Sapiens2Attention", _REGISTERS),
    _hf("siglip", "SiglipAttention"),
    _hf("siglip2", "Siglip2Attention", embedding="Siglip2VisionEmbeddings"),
    _hf("smolvlm", "SmolVLMVisionAttention"),
    _hf("tipsv2", "Tipsv2VisionAttention", _REGISTERS),
    _hf("videomae", "VideoMAESelfAttention"),
    _hf("videomt", "VideomtAttention", _QUERIES),
    _hf("vit_msn", "ViTMSNAttention", 1),
    _hf("vitpose", "VitPoseBackboneSelfAttention"),
    _hf("vivit", "VivitAttention", 1),
    _hf("vjepa2", "VJEPA2RopeAttention", turn=1.0),
    _hf("yolos", "YolosSelfAttention", 1, suffix="num_detection_tokens"),
    _packed("qwen2_vl", "VisionAttention"),
    _packed(
        "qwen2_5_vl, qwen2_5_omni",
        "Qwen2_5_VLVisionAttention Qwen2_5OmniVisionAttention",
        order=by_windows_of_merged,
        global_layers="fullatt_block_indexes",
    ),
    _packed(
        "qwen3_vl, qwen3_vl_moe, qwen3_omni_moe",
        "Qwen3VLVisionAttention Qwen3VLMoeVisionAttention Qwen3OmniMoeVisionAttention",
    ),
    _packed("qwen3_5, qwen3_5_moe", "Qwen3_5VisionAttention Qwen3_5MoeVisionAttention"),
    _packed("glm4v, glm4v_moe, glm46v", "Glm4vVisionAttention Glm4vMoeVisionAttention"),
    _packed("kimi_k25", "Kimi_K25VisionAttention", order=by_rows, joined=True),
    _packed("pixtral, mistral3", "PixtralAttention", "image_sizes", by_rows, own_mask=True),
    _packed(
        "minicpmv4_6, minicpmv4_7",
        "MiniCPMV4_6VisionAttention MiniCPMV4_7VisionAttention",
        "target_sizes",
        by_rows,
        halved=True,
    ),
    _packed("radio", "RadioAttention", "image_grid_hw", by_rows, prefix="num_cls_tokens + num_registers"),
    _hf(
        "rf_detr",
        "RfDetrDinov2Attention",
        1,
        order=by_swapped_divisions,
        parts="num_windows",
        window_layers="window_block_indexes",
    ),
    _hf("lw_detr", "LwDetrViTAttention", order=by_divisions, window_layers="window_block_indices"),
    _refused("vit_mae", "its encoder sees a random part of the patches, shuffled", "ViTMAEAttention"),
    _refused("beit", _MASK, "BeitAttention"),
    _refused("data2vec_vision", _MASK, "Data2VecVisionSelfAttention Data2VecVisionSdpaSelfAttention"),
    _refused("swin", _WINDOWS, "SwinAttention"),
    _refused("swinv2", _WINDOWS, "Swinv2SelfAttention"),
    _refused("donut", _WINDOWS, "DonutSwinSelfAttention"),
    _refused("segformer", _FEWER, "SegformerAttention"),
    _refused("pvt", _FEWER, "PvtEfficientSelfAttention"),
    _refused("pvt_v2", _FEWER, "PvtV2SelfAttention"),
    _refused("sam, sam_hq with eager attention", _EAGER, "SamVisionAttention SamHQVisionAttention"),
    _refused("vitdet", _CLOSED, "VitDetAttention"),
    _refused("hiera", _CLOSED, "HieraMaskUnitAttention"),
    _refused("levit", _CLOSED, "LevitAttention"),
    _refused("blip", _CLOSED, "BlipAttention"),
)
#: The families of Hugging Face models, served and refused, by the name of their attention class.
_HUGGING_FACE = {kind: row for row in _BUILT_IN if row.library == "transformers" for kind in row.attention}


def families() -> tuple[Family, ...]:
    """Every row of the table, users' families last."""
    return (*_BUILT_IN, *(row for row in _HUGGING_FACE.values() if row.library == "plug-in"))


def register_family(
    name: str,
    attention: type[nn.Module] | str,
    *,
    prefix: Count | tuple[Count, ...] = 0,
    suffix: Count = 0,
    turn: float = 0.0,
) -> None:
    """Let `convert` and `patch` serve a family of Hugging Face models.

    The attention must call transformers' `AttentionInterface` with queries, keys and values of all tokens, and must
    have the model's configuration as `config`. A convolution without overlap must make the patches, in row-major order.

    Args:
        name: what users call the family.
        attention: the attention class, or its name.
        prefix: number of tokens in front of the patches, such as class tokens: an integer, or a sum of integers and
            attributes of the configuration, such as `"1 + num_register_tokens"`. A tuple lists all possible numbers.
        suffix: number of tokens behind the patches.
        turn: largest angle in radians by which rotary positions turn a key from one patch to the next.

    Raises:
        UserError: another family has an attention class of this name.
    """
    kind = attention if isinstance(attention, str) else attention.__name__
    row = Family(name, "plug-in", (kind,), prefix=prefix, suffix=suffix, turn=turn)
    other = _HUGGING_FACE.get(kind)
    if other is not None and other != row:
        raise UserError(f"attention class {kind!r} belongs to the family {other.name!r} already")
    _HUGGING_FACE[kind] = row
    if not isinstance(attention, str):
        remember_source(attention)


def hf_family(module: nn.Module) -> Family | None:
    """The family of a Hugging Face attention module."""
    row = _HUGGING_FACE.get(type(module).__name__)
    return row if row is None or row.library == "plug-in" or is_transformers(module) else None


def is_transformers(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.")


def is_published_sam(kind: type, name: str = "Attention") -> bool:
    """Whether this is a class of SAM's published code."""
    return (kind.__module__, kind.__qualname__) == (_SAM_CODE, name)


@functools.cache
def hf_rebuilt() -> frozenset[str]:
    """The names of the model classes of transformers that `convert` rebuilds."""
    return frozenset(
        name for row in _BUILT_IN if row.library == "transformers" and row.convert == "rebuild" for name in row.models
    )


@functools.cache
def timm_models(integration: str) -> tuple[type, ...]:
    """The model classes of timm that `convert` serves by an integration; a class that this timm lacks is left out."""
    return _classes(
        name for row in _BUILT_IN if row.library == "timm" for name in row.models if row.convert == integration
    )


@functools.cache
def timm_refusals() -> dict[type, str]:
    """The model and attention classes of timm that are refused, with the reason."""
    rows = [row for row in _BUILT_IN if row.library == "timm" and row.refused]
    return {cls: row.refused for row in rows for cls in _classes((*row.attention, *row.models))}


def _classes(names: Any) -> tuple[type, ...]:
    found = []
    for name in names:
        module, _, cls = name.rpartition(".")
        try:
            found.append(getattr(importlib.import_module(module), cls))
        except (ImportError, AttributeError):
            continue
    return tuple(found)


def convertible() -> list[str]:
    """What users call the models that `convert` serves."""
    served = [row for row in families() if row.convert]
    own = ("timm", "segment_anything")
    return [row.name if row.library in own else f"Hugging Face {row.name}" for row in served]
