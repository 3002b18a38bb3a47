"""SAM 2 Hiera-Tiny with its real weights: masks, latency and memory of `foveal` in its global blocks.

    python benchmarks/sam2.py SAM2 DATA [--out FILE] [--pets 100] [--coco 128] [--work DIR] [--stage S …]

SAM2 is the folder that examples/sam2_weights.py makes; DATA holds pets-256 and coco128. Images are resized to 1,024 px
and masks are prompted with boxes. Nothing is trained. Each stage resumes if it was interrupted:

    masks      masks of every variant, against the annotation and against the unmodified encoder
    pairs      as `masks`, and encoder latency on the same images: unmodified and variants alternate
    time       encoder latency of more variants on one image, interleaved with the unmodified encoder
    memory     peak memory of the encoder, each variant in a separate process
    gather     summaries of the masks of all images, and the masks that changed most, into FILE
    draw       the figure: masks of the unmodified encoder and of one variant
    quote      the tables in docs/results/sam2.md, from FILE

Pets have annotated masks (intersection over union, without the border of the trimap). coco128 has boxes only: the box
around the mask is compared with the annotated box. `--seconds` stops `masks` and `pairs` after that time.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from quoting import quote
from study import Rows, speed, table
from torch import Tensor, nn

import attendless
from attendless.measure.accuracy import preprocessing
from attendless.measure.clock import interleave
from attendless.measure.memory import peak_memory
from attendless.stamp import stamp_line

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))
SIZE = 1024
#: The block at which variants begin to differ.
FIRST = 5
#: Attentions of the global blocks. `full` is timm's function in bands; `merge` merges tokens, attends and unmerges.
SPECS = (
    "full",
    "foveal:keep=0.5",
    "foveal:keep=0.4",
    "8xfoveal:keep=0.4/4xfoveal:keep=0.15",
    "6xfoveal:keep=0.5/6xfoveal:keep=0.25",
    "8xfoveal:keep=0.25/4xfoveal:keep=0.5",
    "foveal:keep=0.25",
    "foveal:keep=0.1",
    "foveal:keep=0.05",
    "foveal:keep=0.25,cell=2",
    "merge:0.5",
)
SETS = ("pets", "coco")
#: The variant whose outliers are listed and whose masks are drawn.
FIRST_CHOICE = "8xfoveal:keep=0.4/4xfoveal:keep=0.15"
#: Smallest predicted quality of a mask that counts as confident.
SURE = 0.8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sam2", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "sam2.json")
    parser.add_argument("--pets", type=int, default=100)
    parser.add_argument("--coco", type=int, default=128)
    parser.add_argument("--attention", nargs="+", choices=SPECS, default=SPECS[1:], help="variants to measure")
    parser.add_argument("--budget", type=float, default=240, help="seconds of the stage `time`")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time limit of `masks` and `pairs`")
    parser.add_argument("--work", type=Path, default=Path("build/sam2"), help="folder of the results per image")
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=[*STAGES])
    args = parser.parse_args()
    os.environ["SAM2"] = str(args.sam2)
    torch.set_num_threads(1)
    for stage in args.stage:
        STAGES[stage](args, Rows(args.out))


def opened(args: argparse.Namespace, attention: str | None = None) -> Any:
    """The encoder: unmodified, or with `attention` in its global blocks."""
    import sam2_masks  # noqa: F401 (registers the model)

    encoder = attendless.open_model("sam2_tiny_encoder", weights=args.sam2 / "encoder.safetensors")
    if attention is None:
        return encoder
    kind, _, share = attention.partition(":")
    attendless.patch(encoder, "full" if kind == "merge" else attention, size=SIZE)
    for block in encoder.trunk.blocks if kind == "merge" else ():
        if not block.is_windowed:
            block.attn.core.attend = functools.partial(merged, share=float(share))
    return encoder


def merged(q: Tensor, k: Tensor, v: Tensor, context: Any, *, share: float) -> tuple[Tensor, Any]:
    """Full attention on merged tokens, of q, k, v [1, H, N, D].

    The first token of every 2 × 2 cell stays. The others join the most similar of those, by the cosine of their keys,
    the most similar first, until `share` of all tokens is gone.
    """
    heads, grid = q.shape[1], context.grid
    tokens = torch.cat([q, k, v], dim=-1).transpose(1, 2).flatten(2)[0]  # [N, H · 3D]
    first = torch.zeros(grid.height, grid.width, dtype=torch.bool)
    first[::2, ::2] = True
    ends, others = first.flatten().nonzero()[:, 0], (~first).flatten().nonzero()[:, 0]
    keys = nn.functional.normalize(k.mean(1)[0], dim=-1)
    nearest = (keys[others] @ keys[ends].T).max(1)
    gone = nearest.values.argsort(descending=True)[: round(share * len(tokens))]
    owner = torch.arange(len(tokens))
    owner[others[gone]] = ends[nearest.indices[gone]]
    left, place = owner.unique(return_inverse=True)
    mean = torch.zeros(len(left), tokens.shape[1]).index_reduce_(0, place, tokens, "mean", include_self=False)
    q, k, v = mean.unflatten(1, (heads, -1)).transpose(0, 1)[None].chunk(3, dim=-1)
    size = place.bincount().log()  # a merged key counts as often as it has tokens
    out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=size.expand(1, 1, len(left), -1))
    return out[:, :, place], context


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


# Masks ---------------------------------------------------------------------------------------------------------------


def masks(args: argparse.Namespace, rows: Rows) -> None:
    """Measure masks of all variants; blocks that the variants share are computed once per image."""
    original = opened(args, "full")  # the same outputs in less time: tests/test_hiera_bands.py
    variants = encoders(args)
    for one in waiting(args, [*variants]):
        x, missing = one.pixels(original), {key: variants[key] for key in variants if key not in one.found}
        with torch.inference_mode():
            tokens, finer = begin(original.trunk, x)
            outputs = {key: finish(encoder, tokens, finer)[0] for key, encoder in {"": original, **missing}.items()}
        one.keep(outputs.pop(""), outputs)


def pairs(args: argparse.Namespace, rows: Rows) -> None:
    """Whole encoders, in another order for every image; the unmodified one is timm's."""
    models = {"": opened(args), **encoders(args)}
    for number, one in enumerate(waiting(args, [f"seconds {spec}" for spec in args.attention])):
        x, outputs, seconds = one.pixels(models[""]), {}, {}
        with torch.inference_mode():
            for key in np.roll(sorted(models), number):
                began = time.perf_counter()
                outputs[key] = models[key](x)[0]
                seconds[key] = time.perf_counter() - began
        one.found |= {f"seconds {spec}": [seconds[""], seconds[spec]] for spec in args.attention}
        one.keep(outputs.pop(""), outputs)


def encoders(args: argparse.Namespace) -> dict[str, Any]:
    return {spec: opened(args, spec) for spec in args.attention}


@dataclasses.dataclass
class Picture:
    """An image with its prompts and its stored results."""

    kind: str
    name: str
    image: Image.Image
    boxes: np.ndarray
    trimap: np.ndarray | None
    file: Rows

    def __post_init__(self) -> None:
        self.found: dict[str, Any] = dict(self.file.get(self.name, {}))

    def pixels(self, encoder: Any) -> Tensor:
        return preprocessing(encoder, (SIZE, SIZE))(self.image)[None]

    def keep(self, original: Tensor, outputs: dict[str, Tensor]) -> None:
        """Compare the masks of encoders' outputs with the annotation and with those of the original encoder."""
        from sam2_masks import iou

        theirs, quality = masked(original, self.image, self.boxes)
        self.found |= {"size": self.image.size, "boxes": self.boxes.tolist(), "quality": quality.tolist()}
        self.found["original"] = self.truth(theirs)
        for key, output in outputs.items():
            ours, _ = masked(output, self.image, self.boxes)
            self.found[key] = {"truth": self.truth(ours), "agreement": iou(ours, theirs).tolist()}
        self.file.keep({self.name: self.found})
        agree = (f"{np.mean(self.found[key]['agreement']):.4f}" for key in outputs)
        print(self.kind, self.name, *agree, flush=True)

    def truth(self, masks: np.ndarray) -> list[float]:
        return [overlap(*pair, self.trimap) for pair in zip(masks, self.boxes, strict=True)]


def waiting(args: argparse.Namespace, wanted: list[str]) -> Iterator[Picture]:
    """The images that lack a result of `wanted`, until `--seconds` have passed."""
    began = time.monotonic()
    sets = {"pets": pets(args.data / "pets-256" / "val", args.pets), "coco": coco(args.data / "coco128", args.coco)}
    files = {kind: Rows(args.work / f"{kind}.json") for kind in sets}
    for kind, (name, *rest) in alternating(sets):
        if time.monotonic() - began > args.seconds:
            return
        if not set(wanted) <= set(files[kind].get(name, {})):
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
            some = [one for one, _ in zip(images, range(10), strict=False)]
            yield from ((kind, one) for one in some)
            if len(some) < 10:
                del sets[kind]


def begin(trunk: Any, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The tokens that enter block `FIRST`, and the maps of the stages that end before it: the same in all variants."""
    x, maps = trunk._pos_embed(trunk.patch_embed(images)), []
    for i, block in enumerate(trunk.blocks[:FIRST]):
        x = block(x)
        maps += [x.permute(0, 3, 1, 2)] if i in trunk.stage_ends else []
    return x, maps


def finish(encoder: Any, x: Tensor, maps: list[Tensor]) -> Tensor:
    """The encoder's output from what `begin` returns."""
    maps = list(maps)
    for i, block in enumerate(encoder.trunk.blocks[FIRST:], FIRST):
        x = block(x)
        maps += [x.permute(0, 3, 1, 2)] if i in encoder.trunk.stage_ends else []
    return encoder.join(maps)


# Latency and memory --------------------------------------------------------------------------------------------------


def photo(args: argparse.Namespace, encoder: Any) -> Tensor:
    _, image, *_ = next(coco(args.data / "coco128", args.coco))
    return preprocessing(encoder, (SIZE, SIZE))(image)[None]


@torch.inference_mode()
def latency(args: argparse.Namespace, rows: Rows) -> None:
    models = {"original": opened(args), "full": opened(args, "full"), **encoders(args)}
    x = photo(args, models["original"])
    found = interleave({name: functools.partial(model, x) for name, model in models.items()}, budget=args.budget)
    ms = {name: 1e3 * found.median(name) for name in models}
    compared = {name: found.compare(name, "original") for name in models if name != "original"}
    timed = {name: {"speedup": c.ratio, "quartiles": list(c.quartiles), "ms": ms[name]} for name, c in compared.items()}
    rows.keep({"timed": rows.get("timed", {}) | timed, "original ms": ms["original"], "precision": "fp32"})
    print(ms["original"], timed, flush=True)


def memory(args: argparse.Namespace, rows: Rows) -> None:
    """Measure the peak memory of each variant, in MB above a running PyTorch."""
    folders = [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")]  # the processes import this file
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    for name in ("original", "full", *args.attention):
        known = rows.get("memory", {})
        if name not in known and not name.startswith("merge"):
            given = {"folder": str(args.sam2), "attention": name}
            known[name] = peak_memory("sam2:build", given, size=(SIZE, SIZE)).peak
            rows.keep({"memory": known})
            print(name, f"{known[name]:.0f} MB", flush=True)


def build(folder: str, attention: str) -> Any:
    """The encoder of a variant; `peak_memory` calls this function in a new process."""
    return opened(argparse.Namespace(sam2=Path(folder)), None if attention == "original" else attention)


# Results -------------------------------------------------------------------------------------------------------------


def gather(args: argparse.Namespace, rows: Rows) -> None:
    found: dict[str, Any] = {}
    for kind in ("pets", "coco"):
        images = {name: one for name, one in Rows(args.work / f"{kind}.json").items() if name != "stamp"}
        found[kind] = {spec: summary(images, spec) for spec in SPECS if any(spec in one for one in images.values())}
        found[kind]["pairs"] = {spec: paired(images, f"seconds {spec}") for spec in found[kind]}
    rows.keep(found)


def paired(images: dict[str, Any], key: str) -> dict[str, Any]:
    """The speed-up over the unmodified encoder on the images on which both were timed."""
    times = np.array([one[key] for one in images.values() if key in one]).reshape(-1, 2)
    low, middle, high = (
        map(float, np.quantile(times[:, 0] / times[:, 1], [0.25, 0.5, 0.75])) if len(times) else [0.0] * 3
    )
    return {"images": len(times), "speedup": middle, "quartiles": [low, high]}


def summary(images: dict[str, Any], spec: str) -> dict[str, Any]:
    """Statistics over all masks of the images that have results of `spec`."""
    some = {name: one for name, one in images.items() if spec in one}
    agreement = np.concatenate([one[spec]["agreement"] for one in some.values()])
    before = np.concatenate([one["original"] for one in some.values()])
    after = np.concatenate([one[spec]["truth"] for one in some.values()])
    quality = np.concatenate([one["quality"] for one in some.values()])
    names = [name for name, one in some.items() for _ in one["boxes"]]
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
        "images": len(some),
        "masks": len(agreement),
        "mean": float(agreement.mean()),
        "median": float(np.median(agreement)),
        "worst": float(agreement.min()),
        "sure": {"masks": int(sure.sum()), "mean": float(agreement[sure].mean())},
        "original": float(before.mean()),
        "truth": float(after.mean()),
        "interval": interval([np.subtract(one[spec]["truth"], one["original"]) for one in some.values()]),
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
    for kind, label in (("pets", "pets"), ("coco", "coco128")):
        for spec in (one for one in SPECS if one in found[kind]):
            row = found[kind][spec]
            lines.append(
                [
                    label,
                    f"`{spec}`",
                    f"{row['masks']} ({row['images']})",
                    f"{row['original']:.4f} → {row['truth']:.4f} ({_signed(row['interval'])})",
                    f"{row['median']:.4f}",
                    f"{row['mean']:.4f}",
                    f"{row['worst']:.3f}",
                    f"{row['sure']['mean']:.4f} ({row['sure']['masks']})",
                ]
            )
        for one in found[kind].get(FIRST_CHOICE, {"outliers": []})["outliers"][:4]:
            truth = f"{one['original']:.3f} → {one['truth']:.3f}"
            outliers.append([label, one["image"], f"{one['agreement']:.3f}", f"{one['quality']:.2f}", truth])
    columns = ["set", "attention", "masks (images)", "IoU with the annotation", "median", "mean", "worst"]
    masks = table([*columns, f"mean where quality ≥ {SURE:g}"], lines)
    columns = ["set", "image", "IoU with the original's mask", "predicted quality", "IoU with the annotation"]
    changed = f"Masks that `{FIRST_CHOICE}` changed most:\n\n{table(columns, outliers)}"
    return f"{speeds(found)}\n\n{masks}\n\n{changed}"


def _signed(bounds: list[float]) -> str:
    return " to ".join(f"{x:+.4f}" for x in bounds).replace("-", "−")


def speeds(found: dict[str, Any]) -> str:
    """The table of latency and memory."""
    used = found["memory"]
    lines = [["timm, unmodified", f"{found['original ms']:,.0f}", "1", f"{used['original']:,.0f}"]]
    for spec in (one for one in SPECS if one in found["timed"]):
        row = found["timed"][spec]
        lines.append([f"`{spec}`", f"{row['ms']:,.0f}", speed(row), f"{used[spec]:,.0f}" if spec in used else "–"])
    pairs = [
        f"{speed(row)} with `{spec}` on {row['images']} images of {kind}"
        for kind in SETS
        for spec, row in found[kind]["pairs"].items()
        if row["images"]
    ]
    about = (
        f"Encoder (trunk and neck), 1,024 px, batch 1, fp32, eager, one thread. Calls of one per image, unmodified and "
        f"variants in turn: {'; '.join(pairs)}. {stamp_line(found['stamp'])}"
    )
    return f"{table(['attention', 'ms', 'speed-up (quartiles)', 'peak MB'], lines)}\n\n{about}"


def put(args: argparse.Namespace, rows: Rows) -> None:
    quote(ROOT / "docs" / "results" / "sam2.md", "sam2", block(rows))


def draw(args: argparse.Namespace, rows: Rows) -> None:
    """Contours of the masks of the unmodified encoder and of the variant, on images of both sets."""
    import matplotlib.pyplot as plt

    models = [opened(args, "full"), opened(args, FIRST_CHOICE)]
    sets = [pets(args.data / "pets-256" / "val", args.pets), coco(args.data / "coco128", args.coco)]
    shown = [next(one) for one in sets for _ in range(2)]
    figure, axes = plt.subplots(2, len(shown), figsize=(2.6 * len(shown), 5.2), layout="constrained")
    for column, (_, image, boxes, _) in zip(axes.T, shown, strict=True):
        x = preprocessing(models[0], (SIZE, SIZE))(image)[None]
        for axis, model, title in zip(column, models, ("unmodified", FIRST_CHOICE), strict=True):
            with torch.inference_mode():
                found, _ = masked(model(x)[0], image, boxes)
            axis.imshow(np.ones((*found.shape[1:], 3)))  # the data sets' terms do not allow publishing their images
            for number, mask in enumerate(found):
                axis.contour(mask, [0.5], colors=[plt.cm.tab10(number % 10)], linewidths=1.2)
            axis.set_title(title, fontsize=8)
            axis.axis("off")
    figure.savefig(ROOT / "docs" / "results" / "sam2.png", dpi=100)


STAGES = {
    "masks": masks,
    "pairs": pairs,
    "time": latency,
    "memory": memory,
    "gather": gather,
    "draw": draw,
    "quote": put,
}

if __name__ == "__main__":
    main()
