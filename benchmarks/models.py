"""What do the models people run at high resolution gain? Each as it comes, against the same attending less.

    python benchmarks/models.py [NAME …] [--json F] [--into PAGE] [--again] [--threads 1] [--budget 60] [--pairs 10]
                                [--busy] [--no-time] [--no-memory]

For each model, at its usual size, in one run: Amdahl's cap of its blocks, milliseconds as timm or transformers run it
(their fused path), how many times sooner it is attending less (the two take turns; median of paired ratios, quartiles
behind it), peak memory of either in a process of its own, and by how much the outputs differ when every key is seen
(`foveal:keep=1`): that is rounding, and proves that nothing was mistaken. (Of Swin: with its own windows.)

The weights are random: they prove equality and speed, and nothing about accuracy. (LayerScale begins near 0 and would
hide what attention does: it is set to 1.) Every model is kept in the JSON file as soon as it was measured, and those
that are there are not measured again: a run that was killed goes on. The table is made of the file; `--into` puts it
between two comments of a page. On a machine with other work to do, `--busy` counts the processor's seconds (of one
thread) in place of the clock's.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import timm
import torch
from study import Rows, table
from torch import Tensor, nn

import attendless
from attendless import UserError
from attendless.measure.clock import device_timer, enough, interleave
from attendless.measure.memory import peak_memory
from attendless.sizes import size_text
from attendless.stamp import stamp, stamp_line
from attendless.storage import atomic

FOVEAL, EVERYTHING = "foveal:keep=0.1", "foveal:keep=1"
START, END = "<!-- benchmarks/models.py --json docs/results/models.json --into docs/models.md -->", "<!-- end -->"
SWIN = "window+window:shift=3"


@dataclasses.dataclass(frozen=True)
class Row:
    """A model by the name people know: how it is built, the size it is used at, and what it is asked to attend with.

    `patched`: in place; else by `convert`. `frames`: of the video that is its input. `exact` computes what it computed.
    """

    make: Callable[[], Any]
    size: tuple[int, int]
    patched: bool = True
    attentions: tuple[str, ...] = (FOVEAL,)
    frames: int = 0
    exact: str = EVERYTHING


class Images(nn.Module):
    """A model that is called with images [B, C, H, W], whatever it calls them, and answers with tensors."""

    def __init__(self, model: nn.Module, frames: int) -> None:
        super().__init__()
        self.model, self.frames = model, frames

    def forward(self, images: Tensor) -> list[Tensor]:
        given = images.unflatten(1, (self.frames, 3)) if self.frames else images
        return tensors(self.model(given))


def tensors(answer: Any) -> list[Tensor]:
    if isinstance(answer, Tensor):
        return [answer] if answer.is_floating_point() else []
    parts = answer.values() if hasattr(answer, "values") else answer if isinstance(answer, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def from_timm(name: str, size: int, *, patched: bool = False, **more: Any) -> Row:
    return Row(lambda: timm.create_model(name, img_size=size), (size, size), patched, **more)


def from_hf(name: str, size: int | tuple[int, int], frames: int = 0, **config: Any) -> Row:
    """A class of transformers' with the configuration it is published with."""

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
    "HF · SAM ViT-B": dataclasses.replace(from_hf("SamVisionModel", 1024), attentions=("full", FOVEAL)),
    "HF · VideoMAE B, 16 frames": from_hf("VideoMAEModel", 224, 16, **BASE, intermediate_size=3072),
}


def build(name: str, attention: str | None = None, keep: bool = False) -> nn.Module:
    """The row's model as it comes, or attending with `attention`."""
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
    """The model and the report of what was done to it."""
    if attention is None:
        return model, None
    below: Any = "keep" if keep else "full"
    if row.patched:
        return model, attendless.patch(model, attention, size=row.size, below_breakeven=below)
    from attendless.convert import convert_with_report

    return convert_with_report(model, attention, below_breakeven=below)


def measure(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each attention of a model."""
    row = ROWS[name]
    model = made(row)
    images = torch.rand(1, 3 * max(row.frames, 1), *row.size)
    contestants, reports = {"as it comes": Images(model, row.frames)}, {}
    for attention in row.attentions:
        less, reports[attention] = attending(row, copy.deepcopy(model), attention)
        contestants[attention] = Images(less.eval(), row.frames)
    calls = {key: call(each, images) for key, each in contestants.items()}
    timer = processor_seconds if options.busy else device_timer()
    found = interleave(calls, timer=timer, budget=max(options.budget, options.pairs * sum(map(timer, calls.values()))))
    exact, _ = attending(row, copy.deepcopy(model), row.exact, keep=True)
    with torch.inference_mode():
        a, b = contestants["as it comes"](images), Images(exact.eval(), row.frames)(images)
    difference = max(float((x - y).abs().max() / x.abs().max()) for x, y in zip(a, b, strict=True))
    del contestants, exact, model, less
    rows = []
    for attention, report in reports.items():
        versus, done = found.compare(attention, "as it comes"), [x for x in report.layers if x.decision == "converted"]
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
                "ms": 1e3 * found.median("as it comes"),
                "ms_less": 1e3 * found.median(attention),
                "speedup": versus.ratio,
                "quartiles": versus.quartiles,
                "pairs": versus.pairs,
                "distinguishable": versus.distinguishable,
                "difference_seeing_everything": difference,
            }
        )
    return rows


def memory(name: str, attentions: Sequence[str], threads: int) -> list[dict[str, float]]:
    """Peak MB of a model as it comes and attending with each of `attentions`, all in processes of their own that import
    this file."""
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
    *("model", "px", "grid", "attention", "layers", "cap", "ms", "speed-up (quartiles)", "MB", "keep=1 differs by"),
)


def cells(row: dict[str, Any]) -> list[str]:
    low, high = row["quartiles"]
    speed = f"{row['speedup']:.2f}× ({low:.2f}–{high:.2f}, {row['pairs']} pairs)"
    if not row["distinguishable"]:
        speed += ", not distinguishable" if enough(row["pairs"]) else ", too few for a verdict"
    return [
        row["model"],
        row["size"],
        row["grid"],
        row["attention"],
        f"{row['converted']} of {row['layers']}",
        f"{row['cap']:.2f}×",
        f"{row['ms']:,.0f} → {row['ms_less']:,.0f}",
        speed,
        f"{row['mb']:,.0f} → {row['mb_less']:,.0f}" if "mb" in row else "",
        f"{row['difference_seeing_everything']:.0e}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"parts of models' names (default: all): {', '.join(ROWS)}")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of the interleave of each model, at least")
    parser.add_argument("--pairs", type=int, default=10, help="of turns at least (fewer than 8 give no verdict)")
    parser.add_argument("--no-time", dest="time", action="store_false", help="interleave no models")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="measure no memory")
    parser.add_argument("--json", type=Path, default=Path("models.json"), help="the file that keeps what was measured")
    parser.add_argument("--into", type=Path, help="put the table into this page")
    parser.add_argument("--again", action="store_true", help="measure what is in the file again")
    parser.add_argument("--busy", action="store_true", help="count the processor's seconds, not the clock's")
    options = parser.parse_args()
    if options.busy and options.threads != 1:
        sys.exit("--busy counts the seconds of one thread: expected --threads 1")
    torch.set_num_threads(options.threads)
    chosen = [name for name in ROWS if not options.names or any(part.lower() in name.lower() for part in options.names)]
    if not chosen:
        sys.exit(f"no model is called like {' or '.join(options.names)}. There are: {', '.join(ROWS)}")
    kept, failed = Rows(options.json), []
    for name in chosen:
        try:
            if options.time and (options.again or name not in kept):
                kept.keep({name: {"rows": measure(name, options), "measured": conditions(options.busy)}})
            rows = kept[name]["rows"] if name in kept else []
            if options.memory and any("mb" not in row for row in rows):
                found = memory(name, [row["attention"] for row in rows], options.threads)
                kept.keep({name: kept[name] | {"rows": [row | peak for row, peak in zip(rows, found, strict=True)]}})
        except (UserError, RuntimeError, ImportError) as error:
            failed.append(f"{name}: {error}")
        print(*(" | ".join(cells(row)) for row in kept.get(name, {"rows": []})["rows"]), sep="\n", flush=True)
    text = page_text(kept)
    print(text)
    if options.into:
        put(options.into, text)
    if failed:
        sys.exit("\n".join(failed))


def page_text(kept: Rows) -> str:
    """The table of all that was measured, and under it where and when."""
    known = [name for name in ROWS if name in kept]
    foot: dict[str, list[str]] = {}
    for name in known:
        foot.setdefault(kept[name]["measured"], []).append(name)
    which = {text: "" if len(foot) == 1 else f"{', '.join(names)}: " for text, names in foot.items()}
    lines = [f"{which[text]}{text}." for text in foot]
    rows = [cells(row) for name in known for row in kept[name]["rows"]]
    missing = [name for name in ROWS if name not in kept]
    lines += [f"Not measured yet: {', '.join(missing)}."] if missing else []
    return "\n".join([table(list(COLUMNS), rows), "", "Batch 1, fp32. " + " ".join(lines)])


def put(page: Path, text: str) -> None:
    """Let the table stand between the comments of a page."""
    before, rest = page.read_text().split(START, 1)
    with atomic(page) as temporary:
        temporary.write_text("\n".join([before + START, text, END + rest.split(END, 1)[1]]))


def conditions(busy: bool) -> str:
    clock = " · seconds of the processor, on a machine with other work" if busy else ""
    return f"{stamp_line(stamp())} · transformers {version('transformers')}{clock}"


if __name__ == "__main__":
    main()
