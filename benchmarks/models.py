"""Speed-up and memory of published models with efficient attention, at the image sizes that they are used with.

    python benchmarks/models.py [NAME …] [--json F] [--into PAGE] [--again] [--threads 1] [--budget 60] [--pairs 10]
                                [--busy] [--no-time] [--no-memory]

For each model the benchmark measures:

    max. speed-up  upper bound for the blocks by Amdahl's law, from MACs
    ms             latency of the unmodified model (timm or transformers, with PyTorch's fused attention), and of the
                   model with efficient attention, in fp32 and in bf16 (weights and activations, eager)
    speed-up       median of paired ratios of an interleaved benchmark, with quartiles; both models in one precision
    MB             peak memory of both models, each in a separate process
    keep=1         largest difference of the outputs with `foveal:keep=1`, relative to the largest output. This
                   attention sees every key, so only rounding differs. (For Swin: with its own windows.)

The weights are random, so the results show equality and speed, and nothing about accuracy. LayerScale is set to 1: it
starts near 0, which would hide differences of the attention. Each model is stored in the JSON file as soon as it is
measured, so an interrupted run resumes; `--again` measures stored models again. `--into` writes the table of the file
between two comments of a page. `--busy` measures CPU time (of one thread), for a machine with other work.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import timm
import torch
from quoting import quote
from study import Rows, table
from torch import Tensor, nn

import attendless
from attendless import UserError
from attendless.convert.conversion import convert_with_report
from attendless.measure.clock import device_timer, enough, interleave
from attendless.measure.memory import peak_memory
from attendless.measure.precision import no_bf16
from attendless.sizes import size_text
from attendless.stamp import stamp, stamp_line

FOVEAL, EVERYTHING = "foveal:keep=0.1", "foveal:keep=1"
SWIN = "window+window:shift=3"
#: Results with trained weights, by model and attention, with a link to their page.
QUALITY = {
    ("timm · DeiT-T", FOVEAL): "top-1 [+0.8 points](results/convert.md), ImageNet subset",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A model of the table.

    make: builds the model.
    size: height and width of its images.
    patched: use `patch`; otherwise `convert`.
    attentions: the specs that are compared with the unmodified model.
    frames: number of frames of a video model; 0 for images.
    exact: a spec that computes the same function as the unmodified model.
    """

    make: Callable[[], Any]
    size: tuple[int, int]
    patched: bool = True
    attentions: tuple[str, ...] = (FOVEAL,)
    frames: int = 0
    exact: str = EVERYTHING


class Images(nn.Module):
    """Wrapper with one interface for all models: takes images [B, C, H, W], returns the output tensors as a list."""

    def __init__(self, model: nn.Module, frames: int) -> None:
        super().__init__()
        self.model, self.frames = model, frames

    def forward(self, images: Tensor) -> list[Tensor]:
        given = images.unflatten(1, (self.frames, 3)) if self.frames else images
        return tensors(self.model(given))


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    parts = output.values() if hasattr(output, "values") else output if isinstance(output, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def from_timm(name: str, size: int, *, patched: bool = False, **more: Any) -> Row:
    return Row(lambda: timm.create_model(name, img_size=size), (size, size), patched, **more)


def from_hf(name: str, size: int | tuple[int, int], frames: int = 0, **config: Any) -> Row:
    """A model class of transformers with the configuration of a published checkpoint."""

    def make() -> Any:
        import transformers

        model = getattr(transformers, name)
        return model(model.config_class(**config))

    return Row(make, (size, size) if isinstance(size, int) else size, frames=frames)


def depth_anything() -> Any:
    import transformers

    backbone = transformers.Dinov2Config(**SMALL, **DINOV2, out_indices=[9, 10, 11, 12], reshape_hidden_states=False)
    sizes = {"reassemble_hidden_size": 384, "neck_hidden_sizes": [48, 96, 192, 384], "fusion_hidden_size": 64}
    config = transformers.DepthAnythingConfig(backbone_config=backbone, patch_size=14, head_hidden_size=32, **sizes)
    return transformers.DepthAnythingForDepthEstimation(config)


SMALL = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6}
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
DINOV2 = {"image_size": 518, "patch_size": 14}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}

ROWS: dict[str, Row] = {
    "timm · DeiT-T": from_timm("deit_tiny_patch16_224", 384),
    "timm · ViT-B/16": from_timm("vit_base_patch16_384", 384),
    "timm · DINOv2 S/14": from_timm("vit_small_patch14_dinov2", 518),
    "timm · DINOv3 S/16": from_timm("vit_small_patch16_dinov3", 1024),
    "timm · DINOv3 B/16": from_timm("vit_base_patch16_dinov3", 1024),
    "timm · EVA-02 B/14": from_timm("eva02_base_patch14_448", 448),
    "timm · SAM ViT-B": from_timm("samvit_base_patch16", 1024, attentions=("full", FOVEAL)),
    "timm · SAM 2 Hiera-T": Row(lambda: timm.create_model("sam2_hiera_tiny"), (1024, 1024)),
    "timm · Swin-T": from_timm("swin_tiny_patch4_window7_224", 448, attentions=(SWIN,), exact=SWIN),
    "HF · DINOv2 S/14": from_hf("Dinov2Model", 518, **SMALL, **DINOV2),
    "HF · DINOv3 S/16": from_hf(
        "DINOv3ViTModel", 1024, **SMALL, intermediate_size=1536, patch_size=16, num_register_tokens=4
    ),
    "HF · Depth Anything S": Row(depth_anything, (518, 518)),
    "HF · SigLIP B/16": from_hf(
        "SiglipVisionModel", 512, **BASE, intermediate_size=3072, image_size=512, patch_size=16
    ),
    "HF · CLIP L/14": from_hf("CLIPVisionModel", 336, **LARGE, image_size=336, patch_size=14),
    "HF · OWLv2 B/16": from_hf("Owlv2VisionModel", 960, **BASE, intermediate_size=3072, image_size=960, patch_size=16),
    "HF · YOLOS-S": from_hf("YolosModel", (512, 864), **SMALL, intermediate_size=1536, image_size=[512, 864]),
    "HF · SAM 2 Hiera-T": from_hf("Sam2HieraDetModel", 1024),
    # transformers would draw its weights with a deviation of 1e-10, which makes every output equal.
    "HF · SAM ViT-B": dataclasses.replace(
        from_hf("SamVisionModel", 1024, initializer_range=0.02), attentions=("full", FOVEAL)
    ),
    "HF · VideoMAE B, 16 frames": from_hf("VideoMAEModel", 224, 16, **BASE, intermediate_size=3072),
}


def build(name: str, attention: str | None = None, keep: bool = False) -> nn.Module:
    """The unmodified model of a row, or the model with `attention`."""
    row = ROWS[name]
    return Images(attending(row, made(row), attention, keep)[0], row.frames)


def made(row: Row) -> Any:
    torch.manual_seed(0)
    model = row.make().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.rpartition(".")[2].startswith(("gamma", "lambda")):
                value.fill_(1)
    return model


def attending(row: Row, model: Any, attention: str | None, keep: bool = False) -> tuple[Any, Any]:
    """The model with `attention`, and the report of the conversion."""
    if attention is None:
        return model, None
    below: Any = "keep" if keep else "full"
    if row.patched:
        return model, attendless.patch(model, attention, size=row.size, below_breakeven=below)
    return convert_with_report(model, attention, below_breakeven=below)


def measure(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Latency and exactness of one model: one row per attention."""
    row = ROWS[name]
    model = made(row)
    images = torch.rand(1, 3 * max(row.frames, 1), *row.size)
    variants, reports = {"unmodified": Images(model, row.frames)}, {}
    for attention in row.attentions:
        changed, reports[attention] = attending(row, copy.deepcopy(model), attention)
        variants[attention] = Images(changed.eval(), row.frames)
    calls = {key: call(each, images) for key, each in variants.items()}
    if not no_bf16():
        rounded = {f"bf16 {key}": copy.deepcopy(each).bfloat16() for key, each in variants.items()}
        calls |= {key: call(each, images.bfloat16()) for key, each in rounded.items()}
    timer = processor_seconds if options.busy else device_timer()
    found = interleave(calls, timer=timer, budget=max(options.budget, options.pairs * sum(map(timer, calls.values()))))
    exact, _ = attending(row, copy.deepcopy(model), row.exact, keep=True)
    with torch.inference_mode():
        a, b = variants["unmodified"](images), Images(exact.eval(), row.frames)(images)
    difference = max(float((x - y).abs().max() / x.abs().max()) for x, y in zip(a, b, strict=True))
    del variants, exact, model, changed
    rows = []
    for attention, report in reports.items():
        bf16 = {}
        if not no_bf16():
            half = found.compare(f"bf16 {attention}", "bf16 unmodified")
            bf16 = {
                "bf16_ms": 1e3 * found.median("bf16 unmodified"),
                "bf16_ms_less": 1e3 * found.median(f"bf16 {attention}"),
                "bf16_speedup": half.ratio,
                "bf16_quartiles": half.quartiles,
                "bf16_distinguishable": half.distinguishable,
                "bf16_over_fp32": found.compare(f"bf16 {attention}", "unmodified").ratio,
            }
        versus, done = found.compare(attention, "unmodified"), [x for x in report.layers if x.decision == "converted"]
        rows.append(
            {
                "model": name,
                "size": size_text(row.size),
                "frames": row.frames,
                "grid": (done or report.layers)[-1].grid,
                "attention": attention,
                "converted": len(done),
                "layers": len(report.layers),
                "cap": report.before.cap,
                "ms": 1e3 * found.median("unmodified"),
                "ms_less": 1e3 * found.median(attention),
                "speedup": versus.ratio,
                "quartiles": versus.quartiles,
                "pairs": versus.pairs,
                "distinguishable": versus.distinguishable,
                "difference_seeing_everything": difference,
            }
            | bf16
        )
    return rows


def memory(name: str, attentions: Sequence[str], threads: int) -> list[dict[str, float]]:
    """Peak memory in MB of the unmodified model and of each attention, each in a new process that imports this file."""
    row = ROWS[name]
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    more: dict[str, Any] = {"size": row.size, "channels": 3 * max(row.frames, 1), "threads": threads}
    before, *after = (
        peak_memory("models:build", {"name": name, "attention": which}, **more).peak for which in (None, *attentions)
    )
    return [{"mb": before, "mb_less": peak} for peak in after]


def processor_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def call(model: nn.Module, images: Tensor) -> Callable[[], None]:
    def forward() -> None:
        with torch.inference_mode():
            model(images)

    return forward


COLUMNS = (
    *("model", "px", "grid", "attention", "layers", "max. speed-up", "ms fp32", "speed-up fp32 (quartiles)"),
    *("ms bf16", "speed-up bf16 (quartiles)", "bf16 over unmodified fp32", "MB", "quality", "keep=1 differs by"),
)


def judged(row: dict[str, Any], kind: str = "") -> str:
    """The speed-up of a row with its quartiles, and whether it is significant."""
    low, high = row[f"{kind}quartiles"]
    text = f"{row[f'{kind}speedup']:.2f}× ({low:.2f}–{high:.2f}, {row['pairs']} pairs)"
    if not row[f"{kind}distinguishable"]:
        text += ", not distinguishable" if enough(row["pairs"]) else ", too few for a verdict"
    return text


def cells(row: dict[str, Any]) -> list[str]:
    bf16 = ["", "", ""]
    if "bf16_ms" in row:
        bf16 = [f"{row['bf16_ms']:,.0f} → {row['bf16_ms_less']:,.0f}", judged(row, "bf16_")]
        bf16 += [f"{row['bf16_over_fp32']:.2f}×"]
    return [
        row["model"],
        row["size"],
        row["grid"],
        row["attention"],
        f"{row['converted']} of {row['layers']}",
        f"{row['cap']:.2f}×",
        f"{row['ms']:,.0f} → {row['ms_less']:,.0f}",
        judged(row),
        *bf16,
        f"{row['mb']:,.0f} → {row['mb_less']:,.0f}" if "mb" in row else "",
        QUALITY.get((row["model"], row["attention"]), "random weights"),
        f"{row['difference_seeing_everything']:.0e}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"parts of the names of models (default: all): {', '.join(ROWS)}")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--budget", type=float, default=60.0, help="minimum seconds of timing per model")
    parser.add_argument("--pairs", type=int, default=10, help="minimum number of pairs (no verdict below 8)")
    parser.add_argument("--no-time", dest="time", action="store_false", help="do not measure latency")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="do not measure memory")
    parser.add_argument("--json", type=Path, default=Path("models.json"), help="results file")
    parser.add_argument("--into", type=Path, help="write the table into this page")
    parser.add_argument("--again", action="store_true", help="measure stored models again")
    parser.add_argument("--busy", action="store_true", help="measure CPU time instead of elapsed time")
    options = parser.parse_args()
    if options.busy and options.threads != 1:
        sys.exit("--busy measures the CPU time of one thread: expected --threads 1")
    torch.set_num_threads(options.threads)
    chosen = [name for name in ROWS if not options.names or any(part.lower() in name.lower() for part in options.names)]
    if not chosen:
        sys.exit(f"no model has a name like {' or '.join(options.names)}. Models: {', '.join(ROWS)}")
    kept, failed = Rows(options.json), []
    for name in chosen:
        try:
            if options.time and (options.again or name not in kept):
                kept.keep({name: {"rows": measure(name, options), "measured": conditions(options.busy)}})
            rows = kept[name]["rows"] if name in kept else []
            if options.memory and any("mb" not in row for row in rows):
                found = memory(name, [row["attention"] for row in rows], options.threads)
                kept.keep({name: kept[name] | {"rows": [row | peak for row, peak in zip(rows, found, strict=True)]}})
                rows = kept[name]["rows"]
        except (UserError, RuntimeError, ImportError) as error:
            failed.append(f"{name}: {error}")
        print(*(" | ".join(cells(row)) for row in kept.get(name, {"rows": []})["rows"]), sep="\n", flush=True)
    text = block(kept)
    print(text)
    if options.into:
        quote(options.into, "models", text)
    if failed:
        sys.exit("\n".join(failed))


def block(kept: Mapping[str, Any]) -> str:
    """The table of all stored models, followed by the conditions of the measurements."""
    known = [name for name in ROWS if name in kept]
    current = [name for name in known if all("bf16_ms" in row for row in kept[name]["rows"])]
    earlier = [name for name in known if name not in current]
    missing = [name for name in ROWS if name not in kept]
    text = section(kept, current)
    text += [f"Not measured yet: {', '.join(missing)}."] if missing else []
    if earlier:
        text += ["**Rows of an earlier commit**, fp32 alone. They were not measured again since."]
        text += section(kept, earlier)
    return "\n\n".join(text)


def section(kept: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The table of some models, and the conditions of their measurements."""
    foot: dict[str, list[str]] = {}
    for name in names:
        foot.setdefault(kept[name]["measured"], []).append(name)
    which = {text: "" if len(foot) == 1 else f"{', '.join(those)}: " for text, those in foot.items()}
    lines = " ".join(f"{which[text]}{text}." for text in foot)
    rows = [cells(row) for name in names for row in kept[name]["rows"]]
    empty = [i for i in range(len(COLUMNS)) if not any(row[i] for row in rows)]
    columns, *rows = ([x for i, x in enumerate(row) if i not in empty] for row in (list(COLUMNS), *rows))
    return [table(columns, rows), f"Batch 1, PyTorch eager. {lines}"]


def conditions(busy: bool) -> str:
    clock = " · CPU time, on a machine with other work" if busy else ""
    return f"{stamp_line(stamp())} · transformers {version('transformers')}{clock}"


if __name__ == "__main__":
    main()
