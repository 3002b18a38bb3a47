"""Time sparse attention kernels against PyTorch's fused full attention, selection of keys included.

    python benchmarks/attention.py [--full] [--flex] [--memory] [--tokens 197 577 …] [--keep 0.1 …]
                                   [--threads 1 …] [--device cuda] [--json F] [--plot F.png] [--publish]

All variants run interleaved in one process. Each row gives the median of paired ratios with quartiles: 2 means half the
latency. Batch 1, 3 heads of width 64, fp32, no gradients.

    full            F.scaled_dot_product_attention, fused
    masked          the same with a mask that leaves each query `keep` of the keys
    foveal          ours, with the sizes that `auto` chooses
    foveal cell=4   ours, cells and tiles of 4 × 4
    gather          ours, a random list of `keep` · N keys for each query
    sparsifiner     ours, `keep` · N keys for each query, selected by a low-rank prediction of rank 32 in which 13 % of
                    the coefficients and 10 % of the basis are not 0, as after training
    block           ours, windows of whole blocks with about `keep` of the keys
    foveal flex     foveal by FlexAttention (--flex; compiles for half a minute at each size)
    foveal triton   foveal by the Triton kernel (--device cuda)

With --device cuda only full and foveal (FlexAttention, Triton) are timed, in bf16; this has not been run on a GPU yet.

At 4,097 tokens a training step (forward and backward) follows; with --memory, peak memory at 16,385 tokens, each
variant in its own process. Minutes by default; --full takes about an hour. --publish writes docs/results/kernels.json
and the table in docs/results/speed.md.
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
from quoting import publish
from study import by_machine, table
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
from attendless_cli.output import write_json

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
    parser.add_argument("--publish", action="store_true", help="write the results file and the table of the page")
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
                rows += timed(n, keep, count, options)
    torch.set_num_threads(threads[0])
    on_cpu = options.device == "cpu"
    if TRAINED in tokens and on_cpu:
        rows += timed(TRAINED, 0.1, threads[0], options, training=True)
    memory = remember(REMEMBERED, 0.1) if on_cpu and (options.full or options.memory) else []

    found = {"stamp": machine, "rows": rows, "memory": memory}
    write_json(options.json, found)
    if options.publish:
        publish("attention", machine, found)
    if options.plot:
        plot(rows, options.plot, machine)


# Variants ------------------------------------------------------------------------------------------------------------


def variants(tokens: int, keep: float, *, with_flex: bool = False) -> dict[str, Run]:
    """Each as a function of q, k, v [1, H, N, D]. What depends only on the sizes is prepared here and not timed."""
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


def gpu_variants(tokens: int, keep: float) -> dict[str, Run]:
    """The variants for a GPU."""
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


def timed(
    tokens: int, keep: float, threads: int, options: argparse.Namespace, training: bool = False
) -> list[dict[str, Any]]:
    gpu = options.device == "cuda"
    runs = gpu_variants(tokens, keep) if gpu else variants(tokens, keep, with_flex=options.flex and not training)
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
        warnings.simplefilter("ignore")  # the compiler's
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
    """A variant as a model whose input is q, k and v: [1, 3 · H, N, D]."""

    def __init__(self, name: str, tokens: int, keep: float) -> None:
        super().__init__()
        self.run = variants(tokens, keep)[name]

    def forward(self, image: Tensor) -> Tensor:
        return self.run(*image.unflatten(1, (3, HEADS)).unbind(1))


def remember(tokens: int, keep: float) -> list[dict[str, Any]]:
    """Peak memory in MB, inputs and result included, each variant in its own process."""
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    print(f"{tokens} tokens, keep {keep}: peak MB")
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


def block(found: Mapping[str, Any]) -> str:
    return by_machine(found, section)


def section(found: Mapping[str, Any]) -> str:
    """The tables of one machine."""
    rows, machine = found["rows"], found["stamp"]
    names = list(dict.fromkeys(row["attention"] for row in rows if row["attention"] != "full"))
    settings: dict[tuple[bool, int], dict[str, Any]] = {}
    for row in rows:
        settings.setdefault((row["training"], row["tokens"]), {})[row["attention"]] = row
    lines = [
        ["training step" if training else "forward", f"{tokens:,}", f"{by['full']['latency_ms']:.2f}"]
        + [ratio_text(by.get(name)) for name in names]
        for (training, tokens), by in sorted(settings.items())
    ]
    text = f"### {machine['cpu']}, {machine['torch_capability']}\n\n"
    text += f"{table(['', 'tokens', 'full, ms', *names], lines)}\n\n{stamp_line(machine)}"
    if found["memory"]:
        peaks = [[row["attention"], f"{row['peak_memory_mb']:.0f}", f"{row['of_full']:.2f}"] for row in found["memory"]]
        text += f"\n\n{table([f'{REMEMBERED:,} tokens', 'peak MB', 'of full'], peaks)}"
    return text


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
