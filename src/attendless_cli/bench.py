"""Measure latency, throughput and memory against the original model on this machine. The original is timm's own model
with its fused attention, in one interleaved benchmark with the others. The maximum speed-up (Amdahl's law) comes first.

A saved file is measured as it is. A model given by name is converted as `attendless convert` does: layers for which
sparser attention is not faster at a size stay full, and the row reports it.

An exported file (.onnx, .xml, .pt2) is timed in its own runtime, interleaved with the original model in eager PyTorch
if its description names a model that can be built here.

examples:
  attendless bench deit_tiny_patch16_224 --attention full foveal:keep=0.1 --size 224 384 1024
  attendless bench deit_tiny_patch16_224 --tokens tome:r=8 --size 224 --threads 1
  attendless bench fast.safetensors --threads 1 --json bench.json
  attendless bench fast.xml --threads 1
  attendless bench deit_tiny_patch16_224 --attention foveal:keep=0.1 --size 384 --runtime eager compile onnx openvino
  attendless bench deit_tiny_patch16_224 --tokens rank:keep=0.5 --runtime openvino --precision fp32 bf16 int8
  attendless bench deit_tiny_patch16_224 --attention foveal:keep=0.1 --size 384 512 768 1024 --plot cost.png
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from . import arguments, output

if TYPE_CHECKING:
    from attendless.attention import Macs
    from attendless.measure.measurement import Measurement, Performance


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.model(parser, exported=True)
    arguments.attention(parser)
    arguments.tokens(parser)
    arguments.predictor(parser)
    arguments.readout(parser, default=arguments.FOR_ALL)
    arguments.size(parser)
    arguments.batch(parser, 1)
    arguments.below_breakeven(parser)
    text = "runtimes: eager, compile, onnx, onnx-kernels, openvino, pt2; with compile alone every measurement is of "
    text += "compiled models, with several the latency alone is compared (default: eager)"
    parser.add_argument("--runtime", metavar="R", nargs="+", default=[], help=text)
    text = "precisions: fp32, bf16, int8, each in every runtime that has it, by latency alone; int8 is calibrated on "
    text += "noise (default: fp32)"
    parser.add_argument("--precision", metavar="P", nargs="+", default=[], help=text)
    arguments.budget(parser, 10.0, "attention and size")
    text = "measure latency alone: no memory, no throughput, no time per part of the model"
    parser.add_argument("--quick", action="store_true", help=text)
    text = "plot latency and memory against the number of tokens, as .png, .svg or .pdf (default: not drawn)"
    parser.add_argument("--plot", metavar="F", type=arguments.target("picture"), help=text)
    text = "seed of the order in which models are timed"
    parser.add_argument("--seed", metavar="S", type=arguments.count, default=0, help=text)
    arguments.threads(parser)
    arguments.json(parser)


def run(args: argparse.Namespace) -> None:
    from attendless.export.file_model import is_exported
    from attendless.export.folder import model_file

    args.model = model_file(args.model)
    if is_exported(args.model):
        _run_file(args)
    else:
        _run(args)


def _run_file(args: argparse.Namespace) -> None:
    """Time an exported file."""
    from attendless.errors import UserError
    from attendless.export.file_model import bench_file
    from attendless.measure.timing import Conditions
    from attendless.sizes import size_text
    from attendless.stamp import stamp_line

    if len(args.size) > 1 or len(args.runtime) > 1 or len(args.precision) > 1 or args.plot:
        raise UserError(
            f"{args.model!r} has one size, runtime and precision: --size, --runtime and --precision take one value, "
            "--plot none"
        )
    arguments.use_threads(args)
    fixed = {
        name: getattr(args, name) for name in ("weights", "pretrained", "attention", "tokens", "predictor", "readout")
    }
    fixed |= {name: next(iter(getattr(args, name)), None) for name in ("size", "runtime", "precision")}
    with output.steps() as say:
        how = Conditions(batch=args.batch, threads=args.threads, budget=args.budget, seed=args.seed, progress=say)
        found = bench_file(args.model, how, **fixed)
    row = found.as_dict()
    columns = ("runtime", "precision", "attention", "size", "ms", "original, eager", "verdict")
    cells = (row["runtime"], row["precision"], found.file.label, size_text(tuple(row["size"])))
    times = (f"{found.latency_ms:.2f}", _number(found.original_ms, 2), found.verdict)
    title = f"{args.model} ({row['model']}) · batch {found.batch}"
    output.print_table(title, columns, [(*cells, *times)], note=stamp_line(found.stamp))
    output.write_json(args.json, {"rows": [row]})


def _run(args: argparse.Namespace) -> None:
    from attendless.measure.bench import bench_rows
    from attendless.measure.plot import plot, slopes
    from attendless.measure.precision import check_precisions
    from attendless.measure.runtime import in_precisions
    from attendless.measure.timing import Conditions
    from attendless.sizes import size_text

    arguments.use_threads(args)
    # One runtime of PyTorch gets every measurement; exported files and several runtimes are compared by latency.
    alone = [] if args.runtime in (["eager"], ["compile"]) else args.runtime
    if args.precision not in ([], ["fp32"]):
        check_precisions(args.precision)
        alone = in_precisions(args.runtime or ["eager"], args.precision)
    compiled = args.runtime == ["compile"]
    rest = not args.quick and not alone
    told: dict[tuple[int, int], str] = {}

    def cap(size: tuple[int, int], text: str) -> None:
        """Print the maximum speed-up before anything is measured, and again when more is known."""
        if told.get(size) != text:
            print(f"maximum speed-up at {size_text(size)} px: {text}", flush=True)
        if not told:
            variants = (len(args.attention) or 1) * (len(args.tokens) or 1)
            variants = (variants + 1) * len(alone) if alone else variants
            _print_estimate(conditions.seconds(variants, len(args.size) or 1))
        told[size] = text

    with output.steps() as say:
        conditions = Conditions(
            batch=args.batch,
            threads=args.threads,
            compile=compiled,
            budget=args.budget,
            memory=rest,
            throughput=rest,
            parts=rest,
            seed=args.seed,
            progress=say,
            announce=lambda size, macs: cap(size, _cap_by_macs(macs)),
        )
        opening = {"weights": args.weights, "pretrained": args.pretrained}
        opening |= {"below_breakeven": args.below_breakeven, "predictor": args.predictor}
        opening |= {"readout": args.readout}
        opening |= {"tokens": args.tokens, "runtimes": alone}
        rows: list[Measurement] = []
        failures: list[str] = []
        for row in bench_rows(args.model, args.attention, args.size, conditions, failures=failures, **opening):
            cap(row.setup.size, row.limit_text())
            if not alone:  # a row of the runtime table says little without the others
                print(
                    f"{row.label} at {size_text(row.setup.size)} px: {row.latency_ms:.1f} ms, {row.verdict}", flush=True
                )
            rows.append(row)
    print()
    if alone:
        _print_runtimes(args.model, rows, failures)
    else:
        _print_rows(args.model, rows)
    if rest:
        _print_parts(rows)
    for panel, lines in slopes(rows).items():
        for name, exponent in lines.items():
            print(f"{panel} of {name}: tokens^{exponent:.2f}")
    if args.plot:
        plot(rows, args.plot)
    output.write_json(args.json, {"rows": [row.as_dict() for row in rows]})


def _cap_by_macs(macs: Macs | None) -> str:
    from attendless.measure.measurement import limit_by_macs

    if macs is None:
        return "no formula exists for this model: its MACs are counted by running it, after the timing"
    return limit_by_macs(macs.cap, macs.share)


def _print_rows(title: str, rows: list[Measurement]) -> None:
    from attendless.sizes import size_text
    from attendless.stamp import stamp_line

    columns = (
        "attention",
        "size",
        "tokens",
        "MACs",
        "ms",
        "baseline",
        "verdict",
        "images/s",
        "baseline",
        "MB",
        "baseline",
    )
    table = [
        (
            row.label,
            size_text(row.setup.size),
            str(row.setup.tokens or "–"),
            output.millions(row.setup.macs.total, 0),
            f"{row.latency_ms:.1f}",
            f"{row.baseline.latency_ms:.1f}",
            row.verdict,
            _rate(row.performance),
            _rate(row.baseline),
            _number(row.performance.peak_memory_mb),
            _number(row.baseline.peak_memory_mb),
        )
        for row in rows
    ]
    notes = [f"{row.label} at {size_text(row.setup.size)} px runs {row.setup.path}: {row.setup.reason}" for row in rows]
    notes += [note for row in rows for note in row.notes]
    batch = f" · batch {rows[0].setup.batch}{' · compiled' if rows[0].setup.compiled else ''}"
    output.print_table(
        title + batch, columns, table, note="\n".join([*dict.fromkeys(notes), stamp_line(rows[0].stamp)])
    )


def _print_runtimes(title: str, rows: list[Measurement], failures: list[str]) -> None:
    """Runtime × attention: the speed-up within each runtime, and over timm's model in eager PyTorch."""
    from attendless.sizes import size_text
    from attendless.stamp import stamp_line

    columns = (
        "runtime",
        "precision",
        "attention",
        "size",
        "tokens",
        "ms",
        "× same runtime",
        "IQR",
        "× timm eager",
        "IQR",
    )
    table = [
        (
            row.setup.runtime,
            row.setup.precision,
            "baseline (timm)" if row.setup.path == "timm" else row.label,
            size_text(row.setup.size),
            str(row.setup.tokens or "–"),
            f"{row.latency_ms:.1f}",
            f"{row.speedup:.2f}",
            f"{row.compared.spread:.2f}",
            _number(row.eager.ratio if row.eager else None, 2),
            _number(row.eager.spread if row.eager else None, 2),
        )
        for row in rows
    ]
    notes = [f"left out: {failure}" for failure in failures]
    notes += [note for row in rows for note in row.notes]
    notes += [
        "× same runtime: speed-up over timm's model in that runtime and precision; × timm eager: over it in eager "
        "PyTorch in fp32."
    ]
    note = "\n".join([*dict.fromkeys(notes), stamp_line(rows[0].stamp)])
    output.print_table(f"{title} · batch {rows[0].setup.batch}", columns, table, note=note)


def _print_parts(rows: list[Measurement]) -> None:
    """Latency per part of the model, with the original model's line above those it is compared with."""
    from attendless.measure.parts import PARTS
    from attendless.sizes import size_text

    table, seen = [], set()
    for row in rows:
        size = row.setup.size
        lines = [("baseline (timm)", row.baseline)] if size not in seen else []
        seen.add(size)
        for name, performance in [*lines, (row.label, row.performance)]:
            if (parts := performance.parts_ms) is not None:
                cells = (f"{parts[part]:.2f}" for part in PARTS)
                whole = f"{performance.whole_ms:.2f}"
                table.append((name, size_text(size), *cells, f"{sum(parts.values()):.2f}", whole))
    print()
    note = "whole: the latency of the table above, to which the parts of an instrumented forward pass are scaled."
    output.print_table("time of each part, in ms", ("attention", "size", *PARTS, "sum", "whole"), table, note=note)


def _print_estimate(seconds: float) -> None:
    """Print how long the benchmark takes, if it is more than a few seconds."""
    minutes, rest = divmod(round(seconds), 60)
    text = f"{minutes} min {rest} s" if minutes else f"{rest} s"
    if seconds > 20:
        print(f"this takes up to about {text}; --quick or a smaller --budget takes less", file=sys.stderr, flush=True)


def _rate(performance: Performance) -> str:
    return "–" if performance.throughput is None else f"{performance.throughput:.1f} at {performance.best_batch}"


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
