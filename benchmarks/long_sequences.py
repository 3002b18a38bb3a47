"""Latency and peak memory of Qwen3-VL's vision towers at 4,096 to 65,536 tokens, with full and foveal attention.

    python benchmarks/long_sequences.py time 8B 16384 [--layers 4] [--variants sdpa foveal:keep=0.05]
                                            [--precisions fp32 bf16] [--busy]
    python benchmarks/long_sequences.py memory 8B 16384 [--layers 1]
    python benchmarks/long_sequences.py attention 8B 65536
    python benchmarks/long_sequences.py selection 8B 16384
    python benchmarks/long_sequences.py page                         # write docs/results/long-sequences.md

The tower has the widths of the published model, random weights and fewer layers. `sdpa` and `eager` are the attentions
of transformers. All runs use one square image, batch 1 and one thread. Each variant is run in each of `--precisions`;
bf16 holds weights and activations of the whole tower in bf16. The baseline is the first variant in the first precision.

    time        interleaved benchmark in one process: seconds of the tower, of each layer and of each attention;
                the speed-up of a variant is the median over pairs of layers
    memory      peak resident memory of each variant in a separate process, above that of a running PyTorch
    attention   seconds of the attention functions on four of the heads, for sizes at which a layer takes too long
    selection   seconds of selecting cells, and of the whole operation

`time` discards the first round if it takes less than `--warm` seconds. Each result is stored as soon as it is measured.
`--busy` measures CPU time, for a machine with other work.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from quoting import quote
from study import Rows, table
from torch.nn import functional as F

import attendless
from attendless.attention import Grid, create
from attendless.measure.memory import _Resident, _small_forward
from attendless.sparse.native import functions
from attendless.stamp import stamp, stamp_line

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "docs/results/long-sequences.json", ROOT / "docs/results/long-sequences.md"
#: Width, MLP width and number of heads of the vision towers.
TOWERS = {"2B": (1024, 4096, 16), "8B": (1152, 4304, 16)}
FULL, FOVEAL = ("sdpa", "eager"), "foveal:keep=0.05"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TWO_LEVELS = [FOVEAL, f"{FOVEAL},coarse=8"]
DEFAULTS = {"time": ["sdpa", FOVEAL], "memory": ["sdpa", FOVEAL], "attention": TWO_LEVELS, "selection": TWO_LEVELS}
#: Number of heads in `attention` and `selection`.
HEADS = 4


def tower(name: str, layers: int) -> Any:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    width, mlp, heads = TOWERS[name]
    torch.manual_seed(0)
    config = Qwen3VLVisionConfig(
        depth=layers, hidden_size=width, intermediate_size=mlp, num_heads=heads, deepstack_visual_indexes=[]
    )
    return Qwen3VLVisionModel(config).eval()


def image(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs of the tower for a square image: patches and grid."""
    side = math.isqrt(tokens)
    if side * side != tokens or side % 2:
        sys.exit(f"{tokens} tokens: expected the square of an even number, such as 4096")
    return torch.rand(tokens, 3 * 2 * 16 * 16), torch.tensor([[1, side, side]])


def attend_with(model: Any, variant: str) -> None:
    attendless.unpatch(model)
    if variant in FULL:
        model.set_attn_implementation(variant)
    else:
        model.set_attn_implementation("sdpa")
        attendless.patch(model, variant, below_breakeven="keep")


class Stopwatch:
    """Measures the seconds of the tower, of each layer, and of the attention function in each layer."""

    def __init__(self, model: Any, clock: Callable[[], float]) -> None:
        self.model, self.clock = model, clock
        self.layers: list[float] = []
        self.attention: list[float] = []
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: self.layers.append(-clock()))
            block.register_forward_hook(lambda *_: self._stop())

    def _stop(self) -> None:
        self.layers[-1] += self.clock()

    @torch.inference_mode()
    def run(self, variant: str, inputs: Sequence[torch.Tensor]) -> dict[str, Any]:
        from transformers import AttentionInterface
        from transformers.models.qwen3_vl import modeling_qwen3_vl

        attend_with(self.model, variant)
        self.layers.clear()
        self.attention.clear()
        name = self.model.config._attn_implementation
        mapping = AttentionInterface._global_mapping if name != "eager" else vars(modeling_qwen3_vl)
        key = name if name != "eager" else "eager_attention_forward"
        function = mapping[key]
        mapping[key] = self._timed(function)
        try:
            start = self.clock()
            self.model(*inputs)
            whole = self.clock() - start
        finally:
            mapping[key] = function
        return {"tower": whole, "layers": list(self.layers), "attention": list(self.attention)}

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = self.clock()
            found = function(*args, **kwargs)
            self.attention.append(self.clock() - start)
            return found

        return call


def time_variants(options: argparse.Namespace) -> dict[str, Any]:
    clock = time.process_time if options.busy else time.perf_counter
    patches, grid = image(options.tokens)
    towers = {name: tower(options.model, options.layers).to(DTYPES[name]) for name in options.precisions}
    watches = {name: Stopwatch(model, clock) for name, model in towers.items()}
    inputs = {name: (patches.to(DTYPES[name]), grid) for name in towers}
    variants = [f"{precision} {variant}" for precision in options.precisions for variant in options.variants]
    runs: dict[str, list[Any]] = {variant: [] for variant in variants}
    took = options.warm
    for number in range(options.rounds + 1):
        if number == options.rounds and took >= options.warm:
            break  # no round was discarded
        order = variants if number % 2 else variants[::-1]
        start = time.perf_counter()
        for variant in order:
            precision, _, attention = variant.partition(" ")
            runs[variant].append(watches[precision].run(attention, inputs[precision]))
            print(variant, json.dumps(runs[variant][-1]), flush=True)
        took = time.perf_counter() - start if number == 0 else took
        if number == 0 and took < options.warm:
            runs = {variant: [] for variant in variants}
    base = runs[variants[0]]
    found = {}
    for variant, each in runs.items():
        pairs = [
            theirs / ours
            for one, other in zip(each, base, strict=True)
            for ours, theirs in zip(one["layers"], other["layers"], strict=True)
        ]
        found[variant] = {
            "tower_s": median(run["tower"] for run in each),
            "layer_s": median(s for run in each for s in run["layers"]),
            "attention_s": median(s for run in each for s in run["attention"]),
            "speedup": median(pairs),
            "range": [min(pairs), max(pairs)],
            "attention_speedup": median(s for run in base for s in run["attention"])
            / median(s for run in each for s in run["attention"]),
            "pairs": len(pairs),
        }
    return {"kind": "time", "variants": found, "against": variants[0], "busy": options.busy}


def memory_of(options: argparse.Namespace) -> dict[str, Any]:
    """Peak memory of each variant in MB, each measured in a separate process."""
    found = {}
    for variant in (f"{precision} {one}" for precision in options.precisions for one in options.variants):
        precision, _, attention = variant.partition(" ")
        command = [sys.executable, __file__, "peak", options.model, str(options.tokens)]
        command += ["--layers", str(options.layers), "--variants", attention, "--precisions", precision]
        child = subprocess.run(command, capture_output=True, text=True)
        if child.returncode:
            sys.exit(f"{variant}: {child.stderr.strip().splitlines()[-1:]}")
        found[variant] = json.loads(child.stdout.splitlines()[-1])
        print(variant, found[variant], flush=True)
    return {"kind": "memory", "peak_mb": found}


@torch.inference_mode()
def peak(options: argparse.Namespace) -> None:
    """Print the peak memory of one variant in MB; run it in a new process."""
    meter = _Resident()
    _small_forward(torch.device("cpu"), torch.float32)
    import transformers.models.qwen3_vl.modeling_qwen3_vl  # noqa: F401

    meter.settle()
    baseline = meter.now()
    dtype = DTYPES[options.precisions[0]]
    model, (patches, grid) = tower(options.model, options.layers).to(dtype), image(options.tokens)
    inputs = patches.to(dtype), grid
    attend_with(model, options.variants[0])
    meter.settle()
    model(*inputs)
    print((meter.peak() - baseline) / 1e6)


@torch.inference_mode()
def few_heads(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds, for `HEADS` heads, of selecting cells, of the whole operation and (`attention`) of full attention."""
    width, _, heads = TOWERS[options.model]
    side, head = math.isqrt(options.tokens), width // heads
    scale = head**-0.5
    drawn = [torch.randn(1, options.tokens, HEADS, head).transpose(1, 2) for _ in range(3)]
    calls: dict[str, Callable[[], Any]] = {}
    for precision in options.precisions:
        q, k, v = (one.to(DTYPES[precision]) for one in drawn)
        if options.do == "attention":
            calls[f"{precision} sdpa"] = partial(F.scaled_dot_product_attention, q, k, v)
        for variant in options.variants:
            core: Any = create(variant, HEADS * head, HEADS, grid=Grid(side, side), projections=False)
            given = (None, None, core.layout(core.grid).sizes, scale)
            calls[f"{precision} {variant}"] = partial(functions.foveal_forward, q, k, v, *given)
            calls[f"choosing {precision} {variant}"] = partial(functions.foveal_select, q, k, *given)
    seconds = {name: [_seconds(call) for _ in range(options.rounds)] for name, call in reversed(calls.items())}
    found = {name: median(each) for name, each in seconds.items()}
    print(found, flush=True)
    return {"kind": "heads", "seconds": found}


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def block(rows: dict[str, Any]) -> str:
    """The tables of the page."""
    kept = [row for key, row in sorted(rows.items(), key=_order) if key != "stamp"]
    times = [
        [
            f"Qwen3-VL-{row['model']}",
            f"{row['tokens']:,}",
            f"{row['layers']}{' *' if row['busy'] else ''}",
            *variant.split(" ", 1),
            f"{one['layer_s']:.1f}",
            f"{one['attention_s']:.1f}",
            f"{one['attention_speedup']:.2f}×" if _compared(row, variant) else "",
            f"{one['speedup']:.2f}× ({one['range'][0]:.2f}–{one['range'][1]:.2f})" if _compared(row, variant) else "",
            f"{one['tower_s']:.0f}",
        ]
        for row in kept
        if row["kind"] == "time"
        for variant, one in row["variants"].items()
    ]
    peaks = [
        [
            f"Qwen3-VL-{row['model']}",
            f"{row['tokens']:,}",
            str(row["layers"]),
            *variant.split(" ", 1),
            f"{mb:,.0f}",
            f"{mb / row['peak_mb']['fp32 sdpa']:.2f}",
        ]
        for row in kept
        if row["kind"] == "memory"
        for variant, mb in row["peak_mb"].items()
    ]
    few = [
        [
            f"Qwen3-VL-{row['model']}",
            f"{row['tokens']:,}",
            *variant.split(" ", 1),
            f"{one:.2f}",
            f"{row['seconds']['fp32 sdpa'] / one:.2f}×" if "fp32 sdpa" in row["seconds"] else "",
            f"{choosing / one:.1%}" if (choosing := row["seconds"].get(f"choosing {variant}")) else "",
        ]
        for row in kept
        if row["kind"] == "heads"
        for variant, one in sorted(row["seconds"].items(), reverse=True)
        if not variant.startswith("choosing")
    ]
    seconds = "s per layer", "of which attention", "attention speed-up", "layer speed-up (range)", "tower, s"
    head = ("tower", "tokens")
    tables = [
        ([*head, "layers", "precision", "attention", *seconds], times),
        ([*head, "layers", "precision", "attention", "peak MB", "of fp32 sdpa"], peaks),
        ([*head, "precision", "attention", f"s, {HEADS} heads", "speed-up", "choosing cells"], few),
    ]
    parts = [table(columns, lines) for columns, lines in tables if lines]
    parts += estimates(kept)
    stamps = dict.fromkeys(row["measured"] for row in kept)
    return "\n\n".join([*parts, "Batch 1. Speed-ups over fp32 sdpa. " + " ".join(f"{text}." for text in stamps)])


def _compared(row: dict[str, Any], variant: str) -> bool:
    return row["against"] == "fp32 sdpa" != variant


def estimates(kept: list[dict[str, Any]]) -> list[str]:
    """Estimated speed-ups of layers that are too slow with `sdpa`: its time on `HEADS` heads is multiplied up."""
    found = []
    few = {(row["model"], row["tokens"]): row["seconds"] for row in kept if row["kind"] == "heads"}
    for row in kept:
        seconds = few.get((row["model"], row["tokens"]), {})
        if row["kind"] != "time" or row["against"] == "fp32 sdpa" or "fp32 sdpa" not in seconds:
            continue
        times, full = TOWERS[row["model"]][2] // HEADS, {}
        for precision in DTYPES:
            measured = row["variants"].get(f"{precision} {FOVEAL}")
            if measured and f"{precision} sdpa" in seconds:
                rest = measured["layer_s"] - measured["attention_s"]
                full[precision] = times * seconds[f"{precision} sdpa"] + rest
        for precision in full:
            took = row["variants"][f"{precision} {FOVEAL}"]["layer_s"]
            over = " and ".join(f"{s / took:.1f}× over {name} sdpa ({s:.0f} s)" for name, s in full.items())
            found.append(f"- {precision} {FOVEAL}: {took:.0f} s per layer measured, {over}")
        title = f"Estimate for a layer of Qwen3-VL-{row['model']} at {row['tokens']:,} tokens. A layer with sdpa is"
        found.insert(0, f"{title} taken as\n{times} times sdpa on {HEADS} heads and the measured rest of the layer:\n")
    return ["\n".join(found)] if found else []


def _order(item: tuple[str, Any]) -> tuple[Any, ...]:
    key, row = item
    return (key == "stamp", *((row["tokens"], row["model"]) if key != "stamp" else ()))


DOES = {"time": time_variants, "memory": memory_of, "attention": few_heads, "selection": few_heads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("do", choices=["time", "memory", "attention", "selection", "peak", "page"])
    parser.add_argument("model", nargs="?", choices=list(TOWERS))
    parser.add_argument("tokens", nargs="?", type=int)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--variants", nargs="+", default=None, help="the first is the baseline")
    parser.add_argument("--precisions", nargs="+", choices=list(DTYPES), default=["fp32"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--warm", type=float, default=30.0, help="discard the first round if it takes less than this many seconds"
    )
    parser.add_argument("--busy", action="store_true", help="measure CPU time instead of elapsed time")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = Rows(options.json)
    if options.do == "page":
        quote(PAGE, "long-sequences", block(kept))
        return
    if options.model is None or options.tokens is None:
        sys.exit(f"{options.do} needs a model and a number of tokens")
    if options.do == "peak":
        peak(options)
        return
    options.variants = options.variants or DEFAULTS[options.do]
    found = DOES[options.do](options)
    busy = " · CPU time, on a machine with other work (rows with *)" if options.busy else ""
    measured = f"{stamp_line(stamp())} · transformers {version('transformers')}{busy}"
    row = {"model": options.model, "tokens": options.tokens, "layers": options.layers, "measured": measured}
    kept = Rows(options.json)  # another process may have added results
    kept.keep({f"{options.do} {options.model} {options.tokens}": row | found})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
