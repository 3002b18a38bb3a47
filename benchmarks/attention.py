"""How much sooner is sparse attention there than full attention? Kernels alone, choosing the keys included.

    python benchmarks/attention.py [--full] [--flex] [--memory] [--tokens 197 577 …] [--keep 0.1 …]
                                   [--threads 1 …] [--device cuda] [--json F] [--plot F.png] [--markdown F.md]

Contestants take turns in one process, and each row gives the median of paired ratios against PyTorch's fused attention
with their quartiles: 2 means half the time. Batch 1, 3 heads of width 64, 32-bit floats, no gradients.

    full            F.scaled_dot_product_attention: fused, every pair
    masked          the same with a mask that leaves each query `keep` of the keys: sparse in name
    foveal          ours, at the sizes `auto` chooses; every query, selection included
    foveal cell=4   ours, cells and tiles of 4 × 4
    gather          ours, each query its own list of keys drawn at random, repeats and all, `keep` · N long
    sparsifiner     ours, each query its own `keep` · N keys, found by a low-rank guess that is timed too: rank 32, with
                    13 % of the coefficients and 10 % of the basis not 0, as after training
    block           ours, windows of whole blocks with about `keep` of the keys
    foveal flex     foveal computed by FlexAttention (--flex; it compiles for half a minute at each size)
    foveal triton   foveal computed by the Triton kernel (--device cuda)

On a GPU (--device cuda) only full and foveal, by FlexAttention and by Triton, compete, in bfloat16. Nobody has run this
on one yet.

Then, at 4,097 tokens, a training step (forward and backward); with `--memory` the peak at 16,385 tokens, every one in a
process of its own. Minutes by default; `--full` is everything, about an hour.
"""

from __future__ import annotations

import argparse
import math
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attendless import execution
from attendless.measure.clock import interleave
from attendless.measure.memory import peak_memory
from attendless.sparse import blocks, patterns
from attendless.sparse import foveal as definition
from attendless.sparse.backends import flex
from attendless.sparse.operations import foveal
from attendless.sparse.operations import gather as gather_attend
from attendless.stamp import stamp, stamp_line
from attendless.storage import atomic
from attendless_cli.output import write_json, write_text

HEADS, WIDTH = 3, 64
SCALE = WIDTH**-0.5
#: A mask of all pairs beyond this many tokens would be gigabytes.
MOST_MASKED = 4097
TRAINED, REMEMBERED = 4097, 16385
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="every size, share and number of threads")
    parser.add_argument("--flex", action="store_true", help="FlexAttention too")
    parser.add_argument("--memory", action="store_true", help="peak memory too")
    parser.add_argument("--tokens", type=int, nargs="+", help="a square and one class token each")
    parser.add_argument("--keep", type=float, nargs="+")
    parser.add_argument("--threads", type=int, nargs="+")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, help="paired ratios of each row, at least")
    parser.add_argument("--budget", type=float, default=5.0, help="seconds of measurement for each size and share")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--plot", help="draw time over tokens into this file")
    parser.add_argument("--markdown", help="write the tables to this file")
    options = parser.parse_args()
    tokens = options.tokens or ([197, 577, 1025, 2305, 4097, 9217, 16385] if options.full else [197, 577, 1025, 4097])
    keeps = options.keep or ([0.05, 0.1, 0.25, 0.5] if options.full else [0.1])
    threads = options.threads or ([1, 2] if options.full else [1])
    options.rounds = options.rounds or (25 if options.full else 9)
    if options.device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("--device cuda: there is none here; leave it out to measure the CPU")
        threads = threads[:1]

    machine = stamp()
    print(stamp_line(machine), flush=True)
    rows: list[dict[str, Any]] = []
    for count in threads:
        torch.set_num_threads(count)
        for n in tokens:
            for keep in keeps:
                rows += compete(n, keep, count, options)
    torch.set_num_threads(threads[0])
    on_cpu = options.device == "cpu"
    if TRAINED in tokens and on_cpu:
        rows += compete(TRAINED, 0.1, threads[0], options, training=True)
    memory = remember(REMEMBERED, 0.1) if on_cpu and (options.full or options.memory) else []

    write_json(options.json, {"rows": rows, "memory": memory})
    if options.markdown:
        write_text(options.markdown, markdown(rows, memory, machine))
    if options.plot:
        plot(rows, options.plot, machine)


# Contestants ---------------------------------------------------------------------------------------------------------


def contestants(tokens: int, keep: float, *, with_flex: bool = False) -> dict[str, Run]:
    """Each as a function of q, k, v [1, H, N, D]. What depends on the sizes alone is made here, not timed."""
    side = math.isqrt(tokens - 1)
    if side * side + 1 != tokens:
        raise SystemExit(f"--tokens {tokens}: expected a square and one, such as 197, 577, 1025 or 4097")
    auto = definition.layout(side, side, 1, keep=keep)
    fours = definition.layout(side, side, 1, keep=keep, cell=4, tile=4, coarse=0)
    random = torch.Generator().manual_seed(tokens)
    indices = torch.randint(tokens, (1, HEADS, tokens, max(1, round(keep * tokens))), generator=random).int()
    lists = blocks.block_lists(window(side, keep))
    runs: dict[str, Run] = {"full": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=SCALE)}
    if tokens <= MOST_MASKED:
        mask = torch.zeros(1, HEADS, tokens, tokens, dtype=torch.bool).scatter_(3, indices.long(), True)
        runs["masked"] = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE)
    runs["foveal"] = lambda q, k, v: foveal(q, k, v, auto, scale=SCALE)
    runs["foveal cell=4"] = lambda q, k, v: foveal(q, k, v, fours, scale=SCALE)
    runs["gather"] = lambda q, k, v: gather_attend(q, k, v, indices, scale=SCALE)
    runs["sparsifiner"] = sparsifiner(tokens, keep)
    runs["block"] = lambda q, k, v: torch.ops.attendless.block_attend(q, k, v, None, lists, SCALE)[0]
    if with_flex:
        runs["foveal flex"] = lambda q, k, v: flex.attend(
            q, k, v, definition.select(q, k, auto, scale=SCALE), auto, scale=SCALE
        )
    return runs


def gpu_contestants(tokens: int, keep: float) -> dict[str, Run]:
    """The same on a GPU: what can compute there."""
    side = math.isqrt(tokens - 1)
    auto = definition.layout(side, side, 1, keep=keep)
    runs: dict[str, Run] = {"full": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=SCALE)}
    for name in ("flex", "triton"):

        def run(q: Tensor, k: Tensor, v: Tensor, name: str = name) -> Tensor:
            with execution(name):
                return foveal(q, k, v, auto, scale=SCALE)

        runs[f"foveal {name}"] = run
    return runs


def sparsifiner(tokens: int, keep: float, rank: int = 32) -> Run:
    """Sparsifiner with a predictor of random weights, as sparse as trained ones are."""
    random = torch.Generator().manual_seed(tokens)
    down = torch.randn(rank, tokens, generator=random) * tokens**-0.5
    up = torch.rand(rank, tokens, generator=random)
    up *= torch.rand(rank, tokens, generator=random) < 0.1
    q, k, _ = inputs(tokens)
    spread = 1.5 / (q @ (down @ k).transpose(-2, -1)).std()

    def coefficients(q: Tensor, k: Tensor) -> Tensor:
        return torch.softmax(spread * (q @ (down @ k).transpose(-2, -1)), dim=-1)

    tau = coefficients(q, k)[0, 0].flatten().sort().values[round(0.87 * rank * tokens)].item()
    tail, sizes = (None, None, None), (max(1, round(keep * tokens)), 1, tau, 0, SCALE)
    return lambda q, k, v: torch.ops.attendless.sparsifiner(q, k, v, None, coefficients(q, k), up, *tail, *sizes)


def window(side: int, keep: float) -> patterns.Pattern:
    """The window of 4 × 4 blocks that comes closest to `keep` of all pairs."""
    blocks = patterns.grid_blocks(side, side, 1, 4)
    options = [patterns.window_pattern(blocks, radius) for radius in range(-(-side // 4))]
    best = min(options, key=lambda pattern: abs(pattern.edges(1) / (side * side + 1) ** 2 - keep))
    return best | patterns.prefix_pattern(blocks)


def inputs(tokens: int, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """As a model makes them: views of one packed tensor."""
    packed = torch.randn(1, tokens, 3, HEADS, WIDTH, generator=torch.Generator().manual_seed(0), requires_grad=grad)
    return packed.permute(2, 0, 3, 1, 4).unbind(0)


# Time ----------------------------------------------------------------------------------------------------------------


def compete(
    tokens: int, keep: float, threads: int, options: argparse.Namespace, training: bool = False
) -> list[dict[str, Any]]:
    gpu = options.device == "cuda"
    runs = gpu_contestants(tokens, keep) if gpu else contestants(tokens, keep, with_flex=options.flex and not training)
    if training:
        del runs["sparsifiner"]  # for inference
    q, k, v = inputs(tokens, training)
    if gpu:
        q, k, v = (x.to("cuda", torch.bfloat16) for x in (q, k, v))

    def forward(run: Run) -> Callable[[], object]:
        def call() -> None:
            with torch.inference_mode():
                run(q, k, v)
            if gpu:
                torch.cuda.synchronize()

        return call

    def step(run: Run) -> Callable[[], object]:
        return lambda: run(q, k, v).sum().backward()

    calls = {name: (step if training else forward)(run) for name, run in runs.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a compiler's, about itself
        result = interleave(calls, rounds=options.rounds, budget=options.budget, max_rounds=200)
    what = "training step" if training else "forward"
    print(f"{tokens} tokens, keep {keep}, {threads} thread{'s'[: threads > 1]}, {what}", flush=True)
    rows = []
    for name in runs:
        versus = result.compare(name, "full")
        low, high = versus.quartiles
        print(f"    {name:<16}{1e3 * result.median(name):10.2f} ms {versus.ratio:8.2f}x  ({low:.2f}–{high:.2f})")
        row = {"attention": name, "tokens": tokens, "keep": keep, "threads": threads, "training": training}
        row |= {"latency_ms": 1e3 * result.median(name), "speedup": versus.ratio, "spread": versus.spread}
        rows.append(row | {"quartiles": [low, high], "pairs": versus.pairs})
    return rows


# Memory --------------------------------------------------------------------------------------------------------------


class Core(nn.Module):
    """A contestant as a model whose image is q, k and v themselves: [1, 3 · H, N, D]."""

    def __init__(self, name: str, tokens: int, keep: float) -> None:
        super().__init__()
        self.run = contestants(tokens, keep)[name]

    def forward(self, image: Tensor) -> Tensor:
        return self.run(*image.unflatten(1, (3, HEADS)).unbind(1))


def remember(tokens: int, keep: float) -> list[dict[str, Any]]:
    """MB at the peak, inputs and result included, each contestant in a process of its own."""
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    print(f"{tokens} tokens, keep {keep}: MB at the peak")
    rows: list[dict[str, Any]] = []
    for name in ("full", "foveal", "foveal cell=4", "block"):
        arguments = {"name": name, "tokens": tokens, "keep": keep}
        found = peak_memory(
            "attention:Core", arguments, size=(tokens, WIDTH), channels=3 * HEADS, threads=torch.get_num_threads()
        )
        ratio = found.peak / rows[0]["peak_memory_mb"] if rows else 1.0
        rows.append({"attention": name, "tokens": tokens, "peak_memory_mb": found.peak, "of_full": ratio})
        print(f"    {name:<16}{found.peak:10.1f} MB {ratio:8.2f} of full", flush=True)
    return rows


# What is written -----------------------------------------------------------------------------------------------------


def markdown(rows: list[dict[str, Any]], memory: list[dict[str, Any]], machine: Mapping[str, Any]) -> str:
    names = list(dict.fromkeys(row["attention"] for row in rows if row["attention"] != "full"))
    settings: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        key = (row["training"], row["threads"], row["tokens"], row["keep"])
        settings.setdefault(key, {})[row["attention"]] = row
    lines = [f"| what | threads | tokens | keep | full, ms | {' | '.join(names)} |", "|---" * (5 + len(names)) + "|"]
    for (training, threads, tokens, keep), found in sorted(settings.items()):
        cells = ["training step" if training else "forward", threads, f"{tokens:,}", keep]
        cells += [f"{found['full']['latency_ms']:.2f}", *(ratio_text(found.get(name)) for name in names)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", f"Times quicker than full attention (quartiles). {stamp_line(machine)}", ""]
    lines += [f"| {REMEMBERED:,} tokens | MB at the peak | of full |", "|---|---|---|"] if memory else []
    lines += [f"| {row['attention']} | {row['peak_memory_mb']:.0f} | {row['of_full']:.2f} |" for row in memory]
    return "\n".join(lines) + "\n"


def ratio_text(row: Mapping[str, Any] | None) -> str:
    return "" if row is None else f"{row['speedup']:.2f} ({row['quartiles'][0]:.2f}–{row['quartiles'][1]:.2f})"


def plot(rows: list[dict[str, Any]], path: str, machine: Mapping[str, Any]) -> None:
    from matplotlib.figure import Figure

    threads, keep = rows[0]["threads"], 0.1 if any(row["keep"] == 0.1 for row in rows) else rows[0]["keep"]
    shown = [row for row in rows if (row["threads"], row["keep"], row["training"]) == (threads, keep, False)]
    figure = Figure(figsize=(7, 5), layout="constrained")
    axis = figure.subplots()
    for name in dict.fromkeys(row["attention"] for row in shown):
        points = [(row["tokens"], row["latency_ms"]) for row in shown if row["attention"] == name]
        axis.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms", title=f"keep {keep}, {threads} thread(s)")
    axis.grid(which="both", alpha=0.2)
    axis.legend()
    figure.supxlabel(stamp_line(machine), fontsize=6)
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=150, format=Path(path).suffix[1:].lower() or "png")


if __name__ == "__main__":
    main()
