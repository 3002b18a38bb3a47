"""Load test of `attendless serve`: correctness, throughput and memory, with invalid requests and killed workers.

    python benchmarks/serve.py MODEL DATA [--weights F] [--requests 10000] [--concurrent 16] [--garbage 0.01]
                               [--kills 2] [--batch 8] [--threads 1] [--attention A] [--size S] [--json F]

The benchmark starts a server on 127.0.0.1 and sends the images of DATA to it repeatedly. It compares every response
with predictions that it computes itself. A fraction `--garbage` of the requests is invalid, in ten different ways; the
server must reject each with status 4xx and an error message. `--kills` workers are killed (SIGKILL) during the test.

The baseline of the throughput is the bare model: preprocessed images, the same number of threads, the best of several
batch sizes, measured before and after the test. Memory is that of the server and its worker. Server and clients share
the machine, so the CPU time of other processes and of the hypervisor is reported too.

The exit code is 1 if a response is wrong or missing, if memory grows by more than 5 %, or if the throughput is below
0.9 of the bare model, not counting the seconds in which a killed worker is replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from attendless.data.source import load_image
from attendless.predict import Opening, Predictor, find_pictures
from attendless.stamp import stamp, stamp_line
from attendless_cli.arguments import parse_size
from attendless_cli.output import write_json

GOAL, GROWTH, TOLERANCE = 0.9, 0.05, 1e-4
BATCHES = (1, 2, 4, 8, 16, 32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("data", help="folder of images")
    parser.add_argument("--weights")
    parser.add_argument("--attention")
    parser.add_argument("--size", type=parse_size)
    parser.add_argument("--images", type=int, default=200, help="number of different images that are sent")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrent", type=int, default=16)
    parser.add_argument("--garbage", type=float, default=0.01)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json")
    args = parser.parse_args()
    opening = Opening(args.model, weights=args.weights, attention=args.attention, size=args.size, threads=args.threads)
    predictor = opening.open()
    files = spread(find_pictures([args.data]), args.images)
    prepare = predictor.card.preparation()
    pixels = torch.stack([torch.from_numpy(prepare(load_image(path)).copy()) for path in files])
    expected = torch.cat([predictor(part) for part in pixels.split(8)]).softmax(1)
    before = bare_speed(predictor, pixels)
    found = asyncio.run(Load(args, [Path(path).read_bytes() for path in files], expected).run())
    after = bare_speed(predictor, pixels)
    bare = {batch: (before[batch] + after[batch]) / 2 for batch in before}
    best = max(bare, key=lambda batch: bare[batch])
    row = {"model": args.model, "attention": predictor.card.description.attention, **found}
    row |= {"bare": bare[best], "bare_batch": best, "ratio": found["steady"] / bare[best]}
    report(args, row)
    write_json(args.json, {"rows": [row | {"threads": args.threads, "batch": args.batch, "bare_all": bare}]})
    good = not row["wrong"] and row["ratio"] >= GOAL and row["growth"] <= GROWTH
    print("all criteria met" if good else "NOT all criteria met")
    return 0 if good else 1


def spread(files: tuple[str, ...], count: int) -> list[str]:
    return [files[i * len(files) // count] for i in range(count)] if len(files) > count else list(files)


def bare_speed(predictor: Predictor, pixels: torch.Tensor, seconds: float = 3.0) -> dict[int, float]:
    """Throughput (images/s) at each batch size, interleaved."""
    times: dict[int, list[float]] = {batch: [] for batch in BATCHES if batch <= len(pixels)}
    began = time.perf_counter()
    while time.perf_counter() - began < seconds * len(times):
        for batch, taken in times.items():
            start = time.perf_counter()
            predictor(pixels[:batch])
            taken.append((time.perf_counter() - start) / batch)
    return {batch: 1 / statistics.median(taken) for batch, taken in times.items()}


def report(args: argparse.Namespace, row: dict[str, Any]) -> None:
    print(f"{row['model']} ({row['attention']}), {args.threads} thread(s), batch up to {args.batch}")
    print(f"{row['requests']} requests, {args.concurrent} at a time: {row['statuses']}; errors: {len(row['wrong'])}")
    for text in row["wrong"][:5]:
        print(f"  {text}")
    print(f"images/s: {row['steady']:.2f} without restarts, {row['overall']:.2f} overall; bare model at batch "
          f"{row['bare_batch']}: {row['bare']:.2f}; ratio {row['ratio']:.3f} (goal {GOAL})")  # fmt: skip
    print(
        f"latency ms: median {row['p50_ms']:.0f}, 99th percentile {row['p99_ms']:.0f}; "
        f"mean batch {row['mean_batch']:.2f}; model busy {100 * row['busy']:.0f} % of the time"
    )
    print(f"CPU ms per request: HTTP, decoding, preprocessing {row['front_ms']:.2f}, clients {row['clients_ms']:.2f}; "
          f"cores used by other processes {row['others']:.2f}, by the hypervisor {row['stolen']:.2f}")  # fmt: skip
    print(
        f"workers killed: {row['kills']}, restarted: {row['restarts']:.0f}, seconds to recover: {row['replaced_after']}"
    )
    print(f"memory MB: {row['memory_mb'][0]:.0f} after warm-up, {row['memory_mb'][1]:.0f} at the end: "
          f"{100 * row['growth']:+.1f} % (limit {100 * GROWTH:.0f} %)")  # fmt: skip
    print(stamp_line(stamp()))


class Load:
    """The server process, its clients, and the recorded responses, latencies and memory."""

    def __init__(self, args: argparse.Namespace, bodies: list[bytes], expected: torch.Tensor) -> None:
        self.args, self.bodies, self.expected = args, bodies, expected
        self.invalid = garbage(bodies[0])
        every = round(1 / args.garbage) if args.garbage else args.requests + 1
        #: For each request: the index of an image, or −1 − k for invalid request k.
        self.order = [
            -1 - n // every % len(self.invalid) if n % every == every // 2 else n % len(bodies)
            for n in range(args.requests)
        ]
        self.numbers = itertools.count()
        self.statuses: Counter[int] = Counter()
        self.wrong: list[str] = []
        self.latency: list[float] = []
        self.responded: list[float] = []
        self.memory: list[tuple[int, float]] = []
        #: CPU seconds of each worker process, by pid: when first seen, when last seen.
        self.spent: dict[int, tuple[float, float]] = {}
        self.gaps: list[tuple[float, float]] = []

    async def run(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            ready = Path(folder, "ready.json")
            self.server = subprocess.Popen(self.command(ready))
            try:
                await self.wait_for(ready)
                found = await self.load()
                self.server.send_signal(signal.SIGTERM)
                self.server.wait(60)
            finally:
                self.server.kill()
        if self.server.returncode:
            self.wrong.append(f"the server exited with code {self.server.returncode}")
        return found | {"wrong": self.wrong}

    def command(self, ready: Path) -> list[str]:
        args = self.args
        words = ["serve", args.model, "--port", "0", "--json", str(ready), "--batch", str(args.batch)]
        words += ["--threads", str(args.threads)]
        for name in ("weights", "attention"):
            words += [f"--{name}", getattr(args, name)] if getattr(args, name) else []
        words += ["--size", f"{args.size[0]}x{args.size[1]}"] if args.size else []
        return [sys.executable, "-m", "attendless", *words]

    async def wait_for(self, ready: Path) -> None:
        while not ready.exists():
            if self.server.poll() is not None:
                raise SystemExit("the server did not start")
            await asyncio.sleep(0.1)
        self.port = int(json.loads(ready.read_text())["rows"][0]["address"].rpartition(":")[2])

    async def load(self) -> dict[str, Any]:
        began, used, before = time.perf_counter(), processor_time(self.server.pid), machine_time()
        own = processor_time(os.getpid())
        watch = [asyncio.create_task(self.watch_memory())]
        watch += [asyncio.create_task(self.kill((n + 1) / (self.args.kills + 1))) for n in range(self.args.kills)]
        await asyncio.gather(*(self.client() for _ in range(self.args.concurrent)))
        seconds, used = time.perf_counter() - began, processor_time(self.server.pid) - used
        all_of_it, stolen = (now - then for now, then in zip(machine_time(), before, strict=True))
        clients, model = processor_time(os.getpid()) - own, sum(last - first for first, last in self.spent.values())
        await asyncio.gather(*watch)
        idle = sum(end - start for start, end in self.gaps)
        outside = [t for t in self.responded if not any(start <= t <= end for start, end in self.gaps)]
        measured = (await self.ask("GET", "/metrics"))[1].decode()
        batches = {name: value(measured, f"attendless_batch_size_{name}") for name in ("sum", "count")}
        ordered = sorted(self.latency)
        memory = self.memory_at(0.15, 0.3), self.memory_at(0.85, 1.0)
        return {
            "requests": len(self.order),
            "statuses": dict(sorted(self.statuses.items())),
            "seconds": seconds,
            "overall": len(self.responded) / seconds,
            "steady": len(outside) / (seconds - idle),
            "p50_ms": 1000 * ordered[len(ordered) // 2],
            "p99_ms": 1000 * ordered[len(ordered) * 99 // 100],
            "mean_batch": batches["sum"] / batches["count"],
            "busy": value(measured, "attendless_model_seconds_sum") / (seconds - idle),
            "front_ms": 1000 * used / len(self.order),
            "clients_ms": 1000 * clients / len(self.order),
            "others": max(0.0, all_of_it - used - clients - model) / seconds,
            "stolen": stolen / seconds,
            "kills": self.args.kills,
            "restarts": value(measured, "attendless_worker_restarts_total"),
            "replaced_after": [round(end - start, 1) for start, end in self.gaps],
            "memory_mb": memory,
            "growth": memory[1] / memory[0] - 1,
        }

    async def client(self) -> None:
        """One client: sends requests one after the other, and reuses its connection while the server keeps it open."""
        streams = None
        while (number := next(self.numbers)) < len(self.order):
            index = self.order[number]
            method, path, head, body = self.invalid[-1 - index] if index < 0 else (
                "POST", "/predict?topk=5", "", self.bodies[index])  # fmt: skip
            began = time.perf_counter()
            try:
                streams = streams or await asyncio.open_connection("127.0.0.1", self.port)
                status, response, closes = await exchange(*streams, method, path, head, body)
            except (OSError, EOFError, ValueError) as error:
                self.wrong.append(f"request {number}: no response: {error!r}")
                streams = None
                continue
            if closes:
                streams[1].close()
                streams = None
            self.statuses[status] += 1
            if index < 0:
                if not 400 <= status < 500 or not json.loads(response).get("error"):
                    self.wrong.append(f"garbage {method} {path} {body[:20]!r}: {status} {response[:100]!r}")
                continue
            self.latency.append(time.perf_counter() - began)
            self.responded.append(time.perf_counter())
            self.check(number, index, status, response)
        if streams:
            streams[1].close()

    def check(self, number: int, index: int, status: int, response: bytes) -> None:
        """Record an error unless the response holds the model's five largest probabilities."""
        if status != 200:
            self.wrong.append(f"request {number}: {status} {response[:100]!r}")
            return
        expected, given = self.expected[index], json.loads(response)["answers"]
        classes = [one["class"] for one in given]
        off = max(abs(expected[one["class"]].item() - one["probability"]) for one in given)
        rest = expected.clone()
        rest[classes] = 0
        missed = rest.max().item() - given[-1]["probability"]
        if len(set(classes)) != 5 or off > TOLERANCE or missed > TOLERANCE:
            self.wrong.append(f"request {number}: off by {off:.2g}, a missing class is more probable by {missed:.2g}")

    async def ask(self, method: str, path: str) -> tuple[int, bytes]:
        streams = await asyncio.open_connection("127.0.0.1", self.port)
        status, response, _ = await exchange(*streams, method, path, "", b"")
        streams[1].close()
        return status, response

    async def kill(self, part: float) -> None:
        """Kill a worker after the fraction `part` of the requests, and record when the server responds again."""
        while self.done() < part:
            await asyncio.sleep(0.05)
        victim = workers(self.server.pid)[0]
        os.kill(victim, signal.SIGKILL)
        start, seen = time.perf_counter(), len(self.responded)
        while len(self.responded) <= seen + self.args.concurrent and self.done() < 1:
            await asyncio.sleep(0.02)
        self.gaps.append((start, time.perf_counter()))

    async def watch_memory(self) -> None:
        while self.done() < 1:
            sizes = [resident(pid) for pid in (self.server.pid, *workers(self.server.pid))]
            for pid in workers(self.server.pid):
                with contextlib.suppress(OSError):
                    now = processor_time(pid)
                    self.spent[pid] = (self.spent.get(pid, (now, now))[0], now)
            if len(sizes) > 1:
                self.memory.append((len(self.responded), sum(sizes)))
            await asyncio.sleep(0.25)

    def done(self) -> float:
        return sum(self.statuses.values()) / len(self.order) if not self.wrong else 1.0

    def memory_at(self, low: float, high: float) -> float:
        total = len(self.responded)
        return statistics.median(size for seen, size in self.memory if low * total <= seen <= high * total)


def garbage(image: bytes) -> list[tuple[str, str, str, bytes]]:
    """Invalid requests, which the server must reject: method, path, further header lines, body."""
    bomb = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(bomb, "PNG")
    form = "Content-Type: multipart/form-data; boundary=x\r\n"
    return [
        ("POST", "/predict", "", b"this is not an image"),
        ("POST", "/predict", "", image[: len(image) // 2]),
        ("POST", "/predict", "", b""),
        ("POST", "/predict", "", bomb.getvalue()),
        ("POST", "/predict", "", os.urandom(20_000)),
        ("POST", "/predict", form, b"--y\r\nno form at all"),
        ("POST", "/predict", form, b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n--x--\r\n'),
        ("POST", "/predict?topk=many", "", image),
        ("GET", "/predict", "", b""),
        ("POST", "/nowhere", "", image[:1000]),
    ]


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str, path: str, head: str, body: bytes
) -> tuple[int, bytes, bool]:
    """Send one request; return the status, the body, and whether the server closes the connection."""
    lines = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{head}\r\n"
    writer.write(lines.encode() + body)
    await writer.drain()
    response = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    fields = dict(line.lower().split(": ", 1) for line in response.split("\r\n")[1:] if ": " in line)
    content = await reader.readexactly(int(fields["content-length"]))
    return int(response.split()[1]), content, fields.get("connection") == "close"


def value(text: str, name: str) -> float:
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))


def workers(server: int) -> list[int]:
    """The server's own worker processes (Linux)."""
    try:
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        threads = [p.read_text().split() for p in Path(f"/proc/{server}/task").glob("*/children")]
    except OSError:
        return []
    found = {int(pid) for pid in itertools.chain(children, *threads)}
    return sorted(pid for pid in found if b"spawn_main" in command_line(pid))


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def processor_time(pid: int) -> float:
    """CPU seconds of a process, without its children (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine_time() -> tuple[float, float]:
    """CPU seconds of all processes, and seconds that the hypervisor gave to other guests (Linux)."""
    user, nice, system, _, _, irq, soft, stolen = map(int, Path("/proc/stat").read_text().split()[1:9])
    return tuple(ticks / os.sysconf("SC_CLK_TCK") for ticks in (user + nice + system + irq + soft, stolen))


def resident(pid: int) -> float:
    """Resident memory of a process in MB (Linux); 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return 0.0


if __name__ == "__main__":
    sys.exit(main())
