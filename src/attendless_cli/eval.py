"""Measure accuracy on a folder of images: top-1 and top-5 with confidence intervals, and top-1 agreement with the
original model. Several attentions are measured in one pass over the images, so differences are paired per image. Every
attention is measured as given, and a saved file as it is, also where sparser attention is not faster.

Folders are matched to the model's classes by the names stored in its file, by ImageNet's (n01440764), by class index,
or, if the model stores no names, in sorted order; a subset of the classes is enough. With --no-labels any folder works.

An exported file (.onnx, .xml, .pt2) is measured in its own runtime with its stored preprocessing, and compared with the
original model if it was made from a saved file that is still there, or if --weights F gives the original's weights.

With --metric, a function of your own scores the outputs of every image, for models that are not classifiers. Its targets
are the labels or, with --no-labels, the original model's outputs.

A detector or segmentor from `train --task` is measured by COCO's average precision, or by mean intersection over union.

examples:
  attendless eval deit_tiny_patch16_224 --weights deit.safetensors --data imagenet/val --attention foveal:keep=0.1
  attendless eval fast.safetensors --data photos/ --no-labels --size 384 --crop-pct 1.0
  attendless eval fast.xml --data imagenet/val --weights deit.safetensors
  attendless eval runs/pets/best.safetensors --data pets --attention full foveal:keep=0.25
  attendless eval sam2_tiny_encoder --weights encoder.safetensors --data photos/ --no-labels --metric sam2_masks:mask_agreement
"""  # noqa: E501 (commands are to be copied whole)

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

from . import arguments, output, tasks

COLUMNS = ("attention", "top-1", "95 %", "top-5", "vs original", "95 %", "agreement", "core MACs", "images/s")
SCORE_COLUMNS = ("attention", "mean", "95 %", "median", "worst", "vs original", "95 %", "core MACs", "images/s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.model(parser, exported=True)
    arguments.attention(parser)
    arguments.tokens(parser)
    arguments.predictor(parser)
    arguments.readout(parser)
    arguments.size(parser, many=False)
    parser.add_argument("--data", metavar="DIR", required=True, help="folder of images")
    parser.add_argument("--no-labels", action="store_true", help="measure agreement alone; folder names do not matter")
    arguments.metric(parser, "top-1 and top-5")
    arguments.crop_pct(parser)
    text = "fp32, or bf16 for a model that PyTorch runs; the original stays in fp32 (default: fp32, or the file's own)"
    parser.add_argument("--precision", metavar="P", help=text)
    arguments.task(parser)
    text = "segmentation: average the predictions over six scales and their mirror images"
    parser.add_argument("--several-scales", action="store_true", help=text)
    text = "images per forward pass (default: 32; 4 for detection and segmentation; 1 with --metric)"
    parser.add_argument("--batch", metavar="B", type=arguments.positive, help=text)
    arguments.images(parser, "all")
    text = "processes that decode images"
    parser.add_argument("--workers", metavar="W", type=arguments.processes, default=1, help=text)
    arguments.threads(parser)
    arguments.json(parser)


def run(args: argparse.Namespace) -> int:
    from attendless.data.labels import NO_LABELS, match_labels
    from attendless.data.opening import open_data
    from attendless.errors import UserError
    from attendless.export.folder import model_file
    from attendless.measure.accuracy import evaluate, preprocessing
    from attendless.measure.scores import evaluate_by
    from attendless.sizes import input_size

    args.model = model_file(args.model)
    arguments.use_threads(args)
    if tasks.task_of(args.model, args.task) != "classification":
        return tasks.evaluate(args)
    if args.several_scales:
        raise UserError("--several-scales is for segmentation")
    metric = arguments.metric_function(args.metric)
    source = open_data(args.data, "val", labels=not args.no_labels)
    model, dense, models, missing = _opened(args)
    labels = NO_LABELS if args.no_labels else match_labels(source.classes, model)
    if metric is not None and dense is None:
        raise UserError(f"--metric compares with the original model, which is not there: {missing}")
    size = args.size or input_size(model)
    skipped: list[str] = []
    with output.progress("images", min(args.images or len(source), len(source))) as step:
        given = (model if dense is None else dense, models, source, preprocessing(model, size, args.crop_pct))
        options: Any = {"limit": args.images, "workers": args.workers, "progress": step, "on_skip": skipped.append}
        if metric is None:
            found: Any = evaluate(*given, labels=labels, batch=args.batch or 32, **options)
        else:
            found = evaluate_by(metric, *given, classes=labels.classes or None, batch=args.batch or 1, **options)
    about = {"model": args.model, "weights": _weights(args), "size": list(size), "labels": labels.how}
    alone = {} if dense is not None else dict.fromkeys(("agreement", "difference", "difference_ci"))
    rows = [
        about | _made(models[name], size) | {"of": len(source)} | vars(accuracy) | alone
        for name, accuracy in found.items()
    ]
    if metric is None:
        columns, cells, note = COLUMNS, _cells, _note(rows[0], missing)
    else:
        columns, cells, note = SCORE_COLUMNS, _score_cells, _score_note(rows[0], args.metric)
    output.print_table(_title(args.data, rows[0]), columns, [cells(row) for row in rows], note=note)
    for reason in skipped[:5]:
        print(f"skipped: {reason}", file=sys.stderr)
    if skipped:
        print(f"{len(skipped)} of {len(source)} images could not be read", file=sys.stderr)
    output.write_json(args.json, {"rows": rows})
    return 1 if skipped else 0


def _opened(args: argparse.Namespace) -> tuple[Any, Any, dict[str, Any], str]:
    """The model, the original or None, the variants by their texts, and why there is no original."""
    from attendless.convert import open_model
    from attendless.export.file_model import in_precision, is_exported, open_file_model, original_of

    changes = {name: getattr(args, name) for name in ("attention", "tokens", "predictor", "readout")}
    opening = {"weights": args.weights, "pretrained": args.pretrained}
    if not is_exported(args.model):
        model = open_model(args.model, **opening, size=args.size)
        dense, models = variants(model, *changes.values())
        if args.precision not in (None, "fp32"):
            models = {name: in_precision(each, args.precision) for name, each in models.items()}
        return model, dense, models, ""
    file = open_file_model(args.model, threads=args.threads, size=args.size, precision=args.precision, **changes)
    dense, why = original_of(file.description, **opening)
    return file, dense, {file.label: file}, why


def variants(
    model: Any, attentions: list[str], tokens: list[str], predictor: str | None, readout: bool | None = None
) -> tuple[Any, dict[str, Any]]:
    """The original model, and each variant by its text as given; variants that compute the same are one."""
    from attendless.convert import convert
    from attendless.measure.measurement import made_of
    from attendless.measure.subject import attention_of, converted, original, tokens_of

    own, reduced = attention_of(model), tokens_of(model)
    dense = original(model) if converted(model) and (own != "full" or reduced) else model
    ready = {(attention_of(dense), ""): dense, (own, reduced): model}
    asked: dict[tuple[str, str], tuple[str, Any]] = {}
    for text, left in itertools.product(attentions or [own], tokens or [reduced]):
        left = "" if left == "none" else left
        made = ready.get((text, left))
        if made is None:
            made = convert(
                dense,
                None if text == attention_of(dense) else text,
                tokens=left or "none",
                below_breakeven="keep",
                predictor=predictor,
                readout=readout,
            )
        elif readout is not None:
            made = convert(made, readout=readout)
        asked.setdefault((attention_of(made), tokens_of(made)), (made_of(text, left), made))
    return dense, dict(asked.values())


def _made(model: Any, size: tuple[int, int]) -> dict[str, Any]:
    """What a variant is made of, and where it runs. The MACs of an exported file are not known."""
    from attendless.export.file_model import FileModel
    from attendless.measure.macs import count
    from attendless.measure.measurement import precision_of
    from attendless.measure.subject import attention_of, tokens_of

    if isinstance(model, FileModel):
        about = model.description
        made = {"attention": about.attention, "tokens_spec": about.tokens or None, "macs": None}
        return made | {"runtime": model.runtime, "precision": model.precision}
    made = {"attention": attention_of(model), "tokens_spec": tokens_of(model) or None}
    return made | {"macs": count(model, size).as_dict(), "runtime": "eager", "precision": precision_of(model)}


def _weights(args: argparse.Namespace) -> str:
    """Where the weights come from."""
    from attendless.convert.source import random_weights
    from attendless.export.file_model import is_exported

    if is_exported(args.model):
        return args.model
    if random_weights(args.model, weights=args.weights, pretrained=args.pretrained):
        return "random"
    return args.weights or ("pretrained" if args.pretrained else args.model)


def _title(data: str, row: dict[str, Any]) -> str:
    model = f"{row['model']} with random weights" if row["weights"] == "random" else row["model"]
    tried = row["images"] + row["skipped"]
    some = "" if tried == row["of"] else f" (of {row['of']}, evenly spread)"
    where = "" if row["runtime"] == "eager" else f" · {row['runtime']} · {row['precision']}"
    return f"{model}{where} · {row['size'][0]}x{row['size'][1]} px · {row['images']} images{some} of {data}"


#: How folders were matched to classes.
LABELS = {
    "by name": "Folders were matched to the model's classes by name.",
    "ImageNet": "Folders were matched to the model's classes by ImageNet's names.",
    "by index": "Folders were matched to the model's classes by their index.",
    "in sorted order": "The model stores no class names: folders were matched to its classes in sorted order.",
    "none": "Without labels only agreement is measured.",
}


SPEEDS = "images/s counts the model alone; compare speeds with `attendless bench`, which interleaves the models."


def _note(row: dict[str, Any], missing: str = "") -> str:
    random = "The weights are random: these numbers say nothing about a trained model. Give --weights F.\n"
    return (
        f"{random if row['weights'] == 'random' else ''}{LABELS[row['labels']]}\n"
        + (
            f"No comparison with the original model: {missing}.\n"
            if missing
            else "vs original: difference in percentage points of top-1 on the same images. agreement: share of images "
            "with the original model's prediction.\n"
        )
        + SPEEDS
    )


def _score_note(row: dict[str, Any], metric: str) -> str:
    targets = "the original model's outputs" if row["labels"] == "none" else "the labels"
    return (
        f"Scores are {metric} of each image against {targets}; higher is better.\n"
        "vs original: mean difference from the original model on the same images.\n"
        f"{SPEEDS}"
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        _name(row),
        _number(row["top1"], ".2f"),
        _interval(row["top1_ci"], ".1f"),
        _number(row["top5"], ".2f"),
        _number(row["difference"], "+.2f"),
        _interval(row["difference_ci"], "+.2f"),
        _number(row["agreement"], ".3f"),
        *_costs(row),
    )


def _score_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        _name(row),
        f"{row['mean']:.4f}",
        _interval(row["mean_ci"], ".4f"),
        f"{row['median']:.4f}",
        f"{row['worst']:.4f}",
        f"{row['difference']:+.4f}",
        _interval(row["difference_ci"], "+.4f"),
        *_costs(row),
    )


def _name(row: dict[str, Any]) -> str:
    from attendless.measure.measurement import made_of

    return made_of(row["attention"], row["tokens_spec"]) + (" (random weights)" if row["weights"] == "random" else "")


def _costs(row: dict[str, Any]) -> tuple[str, str]:
    return "–" if row["macs"] is None else output.millions(row["macs"]["core"]), f"{row['throughput']:.1f}"


def _interval(pair: tuple[float, float] | None, form: str) -> str:
    return "–" if pair is None else f"{pair[0]:{form}} to {pair[1]:{form}}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"
