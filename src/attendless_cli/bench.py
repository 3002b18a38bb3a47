"""Measure speed and memory against the dense model, here and now: the dense model is timm's own, with its fused
attention, timed by turns with the others in one process. The cap, the most that attending less could gain, comes first.

A saved file is measured as it is. A model given by its name is converted as `attendless convert` does it: where
attending less cannot pay at a size the layer stays full, and the row says so.

examples:
  attendless bench deit_tiny_patch16_224 --attention full foveal:keep=0.1 --size 224 384 1024
  attendless bench deit_tiny_patch16_224 --tokens tome:r=8 --size 224 --threads 1
  attendless bench fast.safetensors --threads 1 --json bench.json
  attendless bench deit_tiny_patch16_224 --attention foveal:keep=0.1 --size 384 --runtime eager compile onnx openvino
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
    arguments.model(parser)
    arguments.attention(parser)
    arguments.tokens(parser)
    arguments.predictor(parser)
    arguments.readout(parser, default=arguments.FOR_ALL)
    arguments.size(parser)
    parser.add_argument("--batch", metavar="B", type=arguments.positive, default=1, help="batch to time (default: 1)")
    breakeven = f"{arguments.BREAKEVEN}. A saved file gets what is asked"
    parser.add_argument("--below-breakeven", choices=("full", "keep"), default="full", help=breakeven)
    parser.add_argument("--compile", action="store_true", help="torch.compile every contestant, the dense one too")
    parser.add_argument(
        "--runtime", metavar="R", nargs="+", default=[],
        help="race every contestant, the dense one too, in each of these: eager, compile, onnx, onnx-kernels, "
        "openvino, pt2; latency alone",
    )  # fmt: skip
    parser.add_argument(
        "--budget", metavar="S", type=arguments.above_zero, default=10.0,
        help="seconds of timing for each attention and size; warming up comes on top (default: 10)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="latency alone: no memory, best batch or parts")
    parser.add_argument(
        "--plot",
        metavar="F",
        type=arguments.target("picture"),
        help="draw ms and MB against the token count: .png, .svg or .pdf",
    )
    parser.add_argument(
        "--seed", metavar="N", type=arguments.count, default=0, help="seed of the turns' order (default: 0)"
    )
    arguments.threads(parser)
    arguments.json(parser)


def run(args: argparse.Namespace) -> None:
    import torch

    from attendless.errors import UserError
    from attendless.measure.bench import Conditions, bench_rows
    from attendless.measure.plot import plot, slopes
    from attendless.sizes import size_text

    if args.threads:
        torch.set_num_threads(args.threads)
    if args.runtime and args.compile:
        raise UserError("--compile and --runtime: give --runtime compile, among others")
    rest = not args.quick and not args.runtime
    told: dict[tuple[int, int], str] = {}

    def cap(size: tuple[int, int], text: str) -> None:
        """What can be gained at most, before anything is measured, and again once more is known."""
        if told.get(size) != text:
            print(f"maximum speed-up at {size_text(size)} px: {text}", flush=True)
        if not told:
            contestants = (len(args.attention) or 1) * (len(args.tokens) or 1)
            contestants = (contestants + 1) * len(args.runtime) if args.runtime else contestants
            _print_estimate(conditions.seconds(contestants, len(args.size) or 1))
        told[size] = text

    with output.steps() as say:
        conditions = Conditions(
            batch=args.batch,
            threads=args.threads,
            compile=args.compile,
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
        opening |= {"tokens": args.tokens, "runtimes": args.runtime}
        rows: list[Measurement] = []
        failures: list[str] = []
        for row in bench_rows(args.model, args.attention, args.size, conditions, failures=failures, **opening):
            cap(row.setup.size, row.limit_text())
            if not args.runtime:  # where a row says little without the others
                print(
                    f"{row.label} at {size_text(row.setup.size)} px: {row.latency_ms:.1f} ms, {row.verdict}", flush=True
                )
            rows.append(row)
    print()
    if args.runtime:
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
        return "there is no formula for this model, so its MACs are counted by running it, after the timing"
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
    """Runtime × attention: the speed-up within a runtime, and of runtime and attention together."""
    from attendless.sizes import size_text
    from attendless.stamp import stamp_line

    columns = ("runtime", "attention", "size", "tokens", "ms", "× same runtime", "IQR", "× timm eager", "IQR")
    table = [
        (
            row.setup.runtime,
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
    notes += ["× same runtime: speed-up over timm's model in that runtime; × timm eager: over it in eager PyTorch."]
    note = "\n".join([*dict.fromkeys(notes), stamp_line(rows[0].stamp)])
    output.print_table(f"{title} · batch {rows[0].setup.batch}", columns, table, note=note)


def _print_parts(rows: list[Measurement]) -> None:
    """The layer view: the time of each part of a model, the baseline's line first."""
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
    note = "whole: the same forward pass without instruments, interleaved. Compare models by the table above."
    output.print_table("time of each part, in ms", ("attention", "size", *PARTS, "sum", "whole"), table, note=note)


def _print_estimate(seconds: float) -> None:
    """How long it will take, if that is worth saying."""
    minutes, rest = divmod(round(seconds), 60)
    text = f"{minutes} min {rest} s" if minutes else f"{rest} s"
    if seconds > 20:
        print(f"this takes up to about {text}; --quick or a smaller --budget takes less", file=sys.stderr, flush=True)


def _rate(performance: Performance) -> str:
    return "–" if performance.throughput is None else f"{performance.throughput:.1f} at {performance.best_batch}"


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
