"""SAM 2 Hiera-Tiny with its real weights: masks, latency and memory, in PyTorch and OpenVINO, in fp32 and bf16.

    python benchmarks/sam2.py SAM2 DATA [--out FILE] [--pets 100] [--coco 128] [--work DIR] [--stage S …]

SAM2 is the folder that examples/sam2_weights.py makes; DATA holds pets-256 and coco128. Images are resized to 1,024 px
and masks are prompted with boxes. Nothing is trained. Each stage resumes if it was interrupted:

    export     the files of the OpenVINO variants, in DIR
    pairs      latency of all variants on the same images, called one after the other, and their masks against the
               annotation and against those of the unmodified encoder in PyTorch fp32
    masks      masks of the variants in `MASKS` on further images, without timing
    memory     peak memory of the variants in PyTorch, each in a separate process
    gather     summaries over all images, and the masks that changed most, into FILE
    quote      the tables in docs/results/sam2.md, from FILE

Pets have annotated masks (intersection over union, without the border of the trimap). coco128 has boxes only: the box
around the mask is compared with the annotated box. `--seconds` stops `pairs` and `masks` after that time.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from quoting import quote
from study import Rows, speed, table
from torch import Tensor

import attendless
from attendless.export import exporting
from attendless.export.openvino import open_raw
from attendless.measure.accuracy import preprocessing
from attendless.measure.malloc import keep_memory
from attendless.measure.memory import peak_memory
from attendless.stamp import stamp_line

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))
SIZE = 1024
#: A rate for each of the 12 blocks; blocks 5, 7 and 9 attend globally.
FOVEAL = "8xfoveal:keep=0.4/4xfoveal:keep=0.15"


@dataclasses.dataclass(frozen=True)
class Variant:
    """runtime: eager or openvino. precision: fp32 or bf16. attention: a spec; None for the unmodified encoder."""

    runtime: str
    precision: str
    attention: str | None = None

    @property
    def key(self) -> str:
        return f"{self.runtime} {self.precision} {self.attention or 'original'}"

    @property
    def original(self) -> str:
        """The unmodified encoder in the same runtime and precision."""
        return dataclasses.replace(self, attention=None).key


BASE = Variant("eager", "fp32")
CHOICE = Variant("eager", "fp32", FOVEAL)
#: `full` is timm's function in bands.
VARIANTS = (
    BASE,
    Variant("eager", "fp32", "full"),
    CHOICE,
    *(Variant("eager", "bf16", attention) for attention in (None, FOVEAL)),
    *(Variant("openvino", precision, attention) for precision in ("fp32", "bf16") for attention in (None, FOVEAL)),
)
#: Variants of the stage `masks`. The unmodified encoder runs as `full`: the same outputs in less time.
MASKS = (CHOICE, Variant("eager", "bf16", FOVEAL), Variant("openvino", "bf16", FOVEAL))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SETS = {"pets": "pets", "coco": "coco128"}
#: Smallest predicted quality of a mask that counts as confident.
SURE = 0.8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sam2", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "sam2.json")
    parser.add_argument("--pets", type=int, default=100)
    parser.add_argument("--coco", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time limit of `pairs` and of `masks`")
    parser.add_argument("--work", type=Path, default=Path("build/sam2"), help="folder of files and results per image")
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=[*STAGES])
    args = parser.parse_args()
    os.environ["SAM2"] = str(args.sam2)
    torch.set_num_threads(1)
    for stage in args.stage:
        STAGES[stage](args, Rows(args.out))


def opened(folder: Path, attention: str | None = None) -> Any:
    """The encoder: unmodified, or with `attention` in its global blocks."""
    import sam2_masks  # noqa: F401 (registers the model)

    encoder = attendless.open_model("sam2_tiny_encoder", weights=folder / "encoder.safetensors")
    if attention is not None:
        attendless.patch(encoder, attention, size=SIZE)
    return encoder.eval()


def file_of(args: argparse.Namespace, variant: Variant) -> Path:
    return Path(args.work / f"{'original' if variant.attention is None else 'foveal'}.xml")


def export(args: argparse.Namespace, rows: Rows) -> None:
    args.work.mkdir(parents=True, exist_ok=True)
    for variant in VARIANTS:
        file = file_of(args, variant)
        if variant.runtime == "openvino" and not file.exists():
            exporting.write(opened(args.sam2, variant.attention), file, batch=1, format="openvino")


def prepared(args: argparse.Namespace, variant: Variant) -> Callable[[Tensor], Tensor]:
    """A function of images [1, 3, S, S] in fp32 that returns the encoder's output in fp32."""
    if variant.runtime == "openvino":
        run = open_raw(file_of(args, variant), floats=variant.precision)
        return lambda images: run(images)[0]
    dtype = DTYPES[variant.precision]
    encoder = opened(args.sam2, variant.attention).to(dtype)
    return lambda images: encoder(images.to(dtype)).float()


# Images and prompts --------------------------------------------------------------------------------------------------


def spread(files: list[Any], count: int) -> list[Any]:
    """`count` evenly spaced files, in an order in which the first ones are evenly spaced too."""
    chosen = [files[i * len(files) // count] for i in range(min(count, len(files)))]
    return [chosen[i] for step in range(5) for i in range(step, len(chosen), 5)]


def pets(folder: Path, count: int) -> Iterator[tuple[str, Image.Image, np.ndarray, np.ndarray]]:
    """Name, image, its box [1, 4] in pixels, and the trimap."""
    for file in spread(sorted((folder / "images").iterdir()), count):
        trimap = np.array(Image.open(next((folder / "trimaps").glob(f"{file.stem}.*"))))
        y, x = np.where(trimap != 2)
        box = np.array([[x.min(), y.min(), x.max() + 1, y.max() + 1]], np.float32)
        yield file.stem, Image.open(file).convert("RGB"), box, trimap


def coco(folder: Path, count: int) -> Iterator[tuple[str, Image.Image, np.ndarray, None]]:
    """Name, image, and its boxes [n, 4] in pixels."""
    annotated = json.loads((folder / "instances.json").read_text())
    boxes: dict[int, list[list[float]]] = {}
    for one in annotated["annotations"]:
        x, y, width, height = one["bbox"]
        if not one["iscrowd"]:
            boxes.setdefault(one["image_id"], []).append([x, y, x + width, y + height])
    for entry in spread([one for one in annotated["images"] if one["id"] in boxes], count):
        image = Image.open(folder / "images" / entry["file_name"]).convert("RGB")
        yield entry["file_name"], image, np.array(boxes[entry["id"]], np.float32), None


def overlap(mask: np.ndarray, box: np.ndarray, trimap: np.ndarray | None) -> float:
    """IoU of a mask with the annotated pet, or of the box around the mask with the annotated box."""
    if trimap is not None:
        known, pet = trimap != 3, trimap == 1
        return float((mask & known & pet).sum() / max(1, ((mask & known) | pet).sum()))
    y, x = np.where(mask)
    if not len(x):
        return 0.0
    ours = np.array([x.min(), y.min(), x.max() + 1, y.max() + 1])
    low, high = np.maximum(ours[:2], box[:2]), np.minimum(ours[2:], box[2:])
    both = np.prod(np.clip(high - low, 0, None))
    return float(both / (np.prod(ours[2:] - ours[:2]) + np.prod(box[2:] - box[:2]) - both))


# Masks and latency ---------------------------------------------------------------------------------------------------


@torch.inference_mode()
def pairs(args: argparse.Namespace, rows: Rows) -> None:
    """Call every variant once per image, in another order for every image."""
    keep_memory()
    calls = {variant.key: prepared(args, variant) for variant in VARIANTS}
    pixels = preprocessing(opened(args.sam2), (SIZE, SIZE))
    warm = torch.zeros(1, 3, SIZE, SIZE)
    for call in calls.values():
        call(warm)
    for number, one in enumerate(waiting(args)):
        x, outputs, seconds = pixels(one.image)[None], {}, {}
        for key in np.roll(list(calls), number):
            began = time.perf_counter()
            outputs[key] = calls[key](x)[0]
            seconds[key] = time.perf_counter() - began
        one.keep(outputs, seconds)


@torch.inference_mode()
def masks(args: argparse.Namespace, rows: Rows) -> None:
    calls = {BASE.key: prepared(args, dataclasses.replace(BASE, attention="full"))}
    calls |= {variant.key: prepared(args, variant) for variant in MASKS}
    pixels = preprocessing(opened(args.sam2), (SIZE, SIZE))
    for one in waiting(args):
        x = pixels(one.image)[None]
        one.keep({key: call(x)[0] for key, call in calls.items()}, {})


@dataclasses.dataclass
class Picture:
    """An image with its prompts and the file of its results."""

    kind: str
    name: str
    image: Image.Image
    boxes: np.ndarray
    trimap: np.ndarray | None
    file: Rows

    def keep(self, outputs: dict[str, Tensor], seconds: dict[str, float]) -> None:
        """Compare the masks of encoders' outputs with the annotation and with those of the unmodified encoder."""
        from sam2_masks import iou

        theirs, quality = masked(outputs[BASE.key], self.image, self.boxes)
        found: dict[str, Any] = {"boxes": self.boxes.tolist(), "quality": quality.tolist(), "seconds": seconds}
        for key, output in outputs.items():
            ours, _ = masked(output, self.image, self.boxes)
            found[key] = {"truth": self.truth(ours), "agreement": iou(ours, theirs).tolist()}
        self.file.keep({self.name: found})
        print(self.kind, self.name, *(f"{np.mean(found[key]['agreement']):.4f}" for key in outputs), flush=True)

    def truth(self, masks: np.ndarray) -> list[float]:
        return [overlap(*pair, self.trimap) for pair in zip(masks, self.boxes, strict=True)]


def waiting(args: argparse.Namespace) -> Iterator[Picture]:
    """The images without results, until `--seconds` have passed."""
    began = time.monotonic()
    sets = {"pets": pets(args.data / "pets-256" / "val", args.pets), "coco": coco(args.data / "coco128", args.coco)}
    files = {kind: Rows(args.work / f"{kind}.json") for kind in sets}
    for kind, (name, *rest) in alternating(sets):
        if time.monotonic() - began > args.seconds:
            return
        if name not in files[kind]:
            yield Picture(kind, name, *rest, files[kind])


def masked(output: Tensor, image: Image.Image, boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For every box the mask of the highest predicted quality, at the image's size, and that quality."""
    from sam2_masks import BOX, decode

    logits, quality = decode(output, boxes.reshape(-1, 2, 2) / np.array(image.size), BOX)
    best = np.arange(len(boxes)), quality.argmax(1)
    large = [np.array(Image.fromarray(one).resize(image.size, Image.Resampling.BILINEAR)) for one in logits[best]]
    return np.stack(large) > 0, quality[best]


def alternating(sets: dict[str, Iterator[Any]]) -> Iterator[tuple[str, Any]]:
    """Ten images of each set in turn, so that an interrupted run has images of every set."""
    while sets:
        for kind, images in list(sets.items()):
            some = list(itertools.islice(images, 10))
            yield from ((kind, one) for one in some)
            if len(some) < 10:
                del sets[kind]


# Memory --------------------------------------------------------------------------------------------------------------


def memory(args: argparse.Namespace, rows: Rows) -> None:
    """Measure the peak memory of each variant in PyTorch, in MB above a running PyTorch."""
    folders = [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")]  # the processes import this file
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    known = rows.get("memory", {})
    for variant in VARIANTS:
        if variant.key not in known and variant.runtime == "eager":
            given = {"folder": str(args.sam2), "attention": variant.attention}
            dtype = str(DTYPES[variant.precision]).removeprefix("torch.")
            known[variant.key] = peak_memory("sam2:build", given, size=(SIZE, SIZE), dtype=dtype, threads=1).peak
            rows.keep({"memory": known})
            print(variant.key, f"{known[variant.key]:.0f} MB", flush=True)


def build(folder: str, attention: str | None) -> Any:
    """The encoder of a variant; `peak_memory` calls this function in a new process."""
    return opened(Path(folder), attention)


# Results -------------------------------------------------------------------------------------------------------------


def gather(args: argparse.Namespace, rows: Rows) -> None:
    found: dict[str, Any] = {}
    everything: list[dict[str, float]] = []
    for kind in SETS:
        file = Rows(args.work / f"{kind}.json")
        measured = file.pop("stamp")
        found[kind] = {variant.key: summary(file, variant.key) for variant in VARIANTS if variant != BASE}
        everything += [one["seconds"] for one in file.values() if one["seconds"]]
    found["timed"] = {variant.key: timed(everything, variant) for variant in VARIANTS}
    rows.keep(found)
    rows.keep({"measured": measured})  # the stamp of the last image, not of this stage


def timed(images: list[dict[str, float]], variant: Variant) -> dict[str, Any]:
    """Median latency, and paired speed-ups over `BASE` and over the unmodified encoder of the same kind."""
    ours = np.array([one[variant.key] for one in images])
    found: dict[str, Any] = {"ms": 1e3 * float(np.median(ours)), "images": len(images)}
    for name, other in (("base", BASE.key), ("own", variant.original)):
        ratios = np.array([one[other] for one in images]) / ours
        low, middle, high = map(float, np.quantile(ratios, [0.25, 0.5, 0.75]))
        found[name] = {"speedup": middle, "quartiles": [low, high]}
    return found


def summary(images: dict[str, Any], key: str) -> dict[str, Any]:
    """Statistics over all masks of a variant."""
    images = {name: one for name, one in images.items() if key in one}
    agreement = np.concatenate([one[key]["agreement"] for one in images.values()])
    before = np.concatenate([one[BASE.key]["truth"] for one in images.values()])
    after = np.concatenate([one[key]["truth"] for one in images.values()])
    quality = np.concatenate([one["quality"] for one in images.values()])
    names = [name for name, one in images.items() for _ in one["boxes"]]
    outliers = [
        {
            "image": names[i],
            "agreement": float(agreement[i]),
            "quality": float(quality[i]),
            "original": float(before[i]),
            "truth": float(after[i]),
        }
        for i in agreement.argsort()[:5]
    ]
    sure = quality >= SURE
    return {
        "images": len(images),
        "masks": len(agreement),
        "mean": float(agreement.mean()),
        "median": float(np.median(agreement)),
        "worst": float(agreement.min()),
        "sure": {"masks": int(sure.sum()), "mean": float(agreement[sure].mean())},
        "original": float(before.mean()),
        "truth": float(after.mean()),
        "interval": interval([np.subtract(one[key]["truth"], one[BASE.key]["truth"]) for one in images.values()]),
        "outliers": outliers,
    }


def interval(differences: list[np.ndarray], draws: int = 2000) -> list[float]:
    """The 95 % bootstrap interval of the mean over all masks. Draws are of images: masks of one are not independent."""
    chosen = np.random.default_rng(0).integers(0, len(differences), (draws, len(differences)))
    means = [np.concatenate([differences[i] for i in each]).mean() for each in chosen]
    return [float(x) for x in np.quantile(means, [0.025, 0.975])]


def block(found: dict[str, Any]) -> str:
    """The tables of latency and memory, of masks, and of the masks that changed most."""
    lines, outliers = [], []
    for kind, label in SETS.items():
        for variant in (one for one in VARIANTS if one != BASE):
            row = found[kind][variant.key]
            lines.append(
                [
                    label,
                    *named(variant),
                    f"{row['masks']} ({row['images']})",
                    f"{row['original']:.4f} → {row['truth']:.4f} ({_signed(row['interval'])})",
                    f"{row['median']:.4f}",
                    f"{row['mean']:.4f}",
                    f"{row['worst']:.3f}",
                    f"{row['sure']['mean']:.4f} ({row['sure']['masks']})",
                ]
            )
        for one in found[kind][CHOICE.key]["outliers"][:4]:
            truth = f"{one['original']:.3f} → {one['truth']:.3f}"
            outliers.append([label, one["image"], f"{one['agreement']:.3f}", f"{one['quality']:.2f}", truth])
    columns = ["set", *NAMES, "masks (images)", "IoU with the annotation", "median", "mean", "worst"]
    masks = table([*columns, f"mean where quality ≥ {SURE:g}"], lines)
    columns = ["set", "image", "IoU with the original's mask", "predicted quality", "IoU with the annotation"]
    changed = f"Masks that `foveal` in PyTorch fp32 changed most:\n\n{table(columns, outliers)}"
    return f"{speeds(found)}\n\n{masks}\n\n{changed}"


NAMES = ("runtime", "precision", "attention")


def named(variant: Variant) -> list[str]:
    attention = {None: "timm, unmodified", "full": "`full`", FOVEAL: "`foveal`"}[variant.attention]
    return [{"eager": "PyTorch", "openvino": "OpenVINO"}[variant.runtime], variant.precision, attention]


def _signed(bounds: list[float]) -> str:
    return " to ".join(f"{x:+.4f}" for x in bounds).replace("-", "−")


def speeds(found: dict[str, Any]) -> str:
    """The table of latency and memory."""
    lines = []
    for variant in VARIANTS:
        row, used = found["timed"][variant.key], found["memory"].get(variant.key)
        base = "1" if variant == BASE else speed(row["base"])
        own = "1" if variant.attention is None else speed(row["own"])
        lines.append([*named(variant), f"{row['ms']:,.0f}", base, own, f"{used:,.0f}" if used else "–"])
    columns = [*NAMES, "ms", "over PyTorch fp32 unmodified", "over unmodified, same runtime and precision", "peak MB"]
    images = found["timed"][BASE.key]["images"]
    about = (
        f"Encoder (trunk and neck), 1,024 px, batch 1, one thread. `foveal`: `{FOVEAL}`. Speed-ups: median and "
        f"quartiles of {images} paired ratios, one call of every variant per image. {stamp_line(found['measured'])}"
    )
    return f"{table(columns, lines)}\n\n{about}"


def put(args: argparse.Namespace, rows: Rows) -> None:
    quote(ROOT / "docs" / "results" / "sam2.md", "sam2", block(rows))


STAGES = {"export": export, "pairs": pairs, "masks": masks, "memory": memory, "gather": gather, "quote": put}

if __name__ == "__main__":
    main()
