"""Does the server answer everything right, under load, with garbage among it and its workers killed, and how fast?

    python benchmarks/serve.py MODEL DATA [--weights F] [--requests 10000] [--concurrent 16] [--garbage 0.01]
                               [--kills 2] [--batch 8] [--threads 1] [--attention A] [--size S] [--json F]

A server is started on 127.0.0.1 and sent the pictures of DATA again and again. Every answer is compared with the
model's own, computed here. Garbage is broken in ten ways, and each must be refused with a 4xx that says why. Workers
are killed (SIGKILL) while requests are under way. The bare model, on pictures that are ready and with as many threads,
is timed at several batches before and after; the best counts. Memory is that of the server and its worker. The exit
code is 1 if an answer was wrong or missing, if memory grew by more than 5 %, or if the server reached less than 0.9 of
the bare model (outside the seconds in which a killed worker was being replaced). Server and clients share the
machine; what other processes took of it meanwhile, and the host of a virtual machine, is reported.
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
    parser.add_argument("--images", type=int, default=200, help="pictures that are sent, again and again")
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
    print("all bars met" if good else "NOT all bars met")
    return 0 if good else 1


def spread(files: tuple[str, ...], count: int) -> list[str]:
    return [files[i * len(files) // count] for i in range(count)] if len(files) > count else list(files)


def bare_speed(predictor: Predictor, pixels: torch.Tensor, seconds: float = 3.0) -> dict[int, float]:
    """Images per second at each batch, which take turns."""
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
    print(f"{row['requests']} requests, {args.concurrent} at a time: {row['statuses']}; wrong: {len(row['wrong'])}")
    for text in row["wrong"][:5]:
        print(f"  {text}")
    print(f"images/s: {row['steady']:.2f} with its workers alive, {row['overall']:.2f} over all; bare model at batch "
          f"{row['bare_batch']}: {row['bare']:.2f}; ratio {row['ratio']:.3f} (goal {GOAL})")  # fmt: skip
    print(
        f"latency ms: median {row['p50_ms']:.0f}, 99 % within {row['p99_ms']:.0f}; mean batch {row['mean_batch']:.2f}; "
        f"the model computed {100 * row['busy']:.0f} % of the time"
    )
    print(f"processor ms a request: HTTP, decoding, preparing {row['front_ms']:.2f}, clients {row['clients_ms']:.2f}; "
          f"other processes took {row['others']:.2f} of a core, the host {row['stolen']:.2f}")  # fmt: skip
    print(f"workers killed: {row['kills']}, started again: {row['restarts']:.0f}, after s: {row['replaced_after']}")
    print(f"memory MB: {row['memory_mb'][0]:.0f} after warming up, {row['memory_mb'][1]:.0f} at the end: "
          f"{100 * row['growth']:+.1f} % (at most {100 * GROWTH:.0f} %)")  # fmt: skip
    print(stamp_line(stamp()))


class Load:
    """The server, the clients, and what they saw."""

    def __init__(self, args: argparse.Namespace, bodies: list[bytes], expected: torch.Tensor) -> None:
        self.args, self.bodies, self.expected = args, bodies, expected
        self.rubbish = garbage(bodies[0])
        every = round(1 / args.garbage) if args.garbage else args.requests + 1
        #: For each request the picture's number, or minus the kind of garbage, from -1.
        self.order = [
            -1 - n // every % len(self.rubbish) if n % every == every // 2 else n % len(bodies)
            for n in range(args.requests)
        ]
        self.numbers = itertools.count()
        self.statuses: Counter[int] = Counter()
        self.wrong: list[str] = []
        self.latency: list[float] = []
        self.answered: list[float] = []
        self.memory: list[tuple[int, float]] = []
        #: Of each worker seconds of processor, when it was first seen and last.
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
            self.wrong.append(f"the server left with {self.server.returncode}")
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
        outside = [t for t in self.answered if not any(start <= t <= end for start, end in self.gaps)]
        measured = (await self.ask("GET", "/metrics"))[1].decode()
        batches = {name: value(measured, f"attendless_batch_size_{name}") for name in ("sum", "count")}
        ordered = sorted(self.latency)
        memory = self.memory_at(0.15, 0.3), self.memory_at(0.85, 1.0)
        return {
            "requests": len(self.order),
            "statuses": dict(sorted(self.statuses.items())),
            "seconds": seconds,
            "overall": len(self.answered) / seconds,
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
        """One client: a request after the other, over one connection while that lasts."""
        streams = None
        while (number := next(self.numbers)) < len(self.order):
            index = self.order[number]
            method, path, head, body = self.rubbish[-1 - index] if index < 0 else (
                "POST", "/predict?topk=5", "", self.bodies[index])  # fmt: skip
            began = time.perf_counter()
            try:
                streams = streams or await asyncio.open_connection("127.0.0.1", self.port)
                status, answer, closes = await exchange(*streams, method, path, head, body)
            except (OSError, EOFError, ValueError) as error:
                self.wrong.append(f"request {number}: no answer: {error!r}")
                streams = None
                continue
            if closes:
                streams[1].close()
                streams = None
            self.statuses[status] += 1
            if index < 0:
                if not 400 <= status < 500 or not json.loads(answer).get("error"):
                    self.wrong.append(f"garbage {method} {path} {body[:20]!r}: {status} {answer[:100]!r}")
                continue
            self.latency.append(time.perf_counter() - began)
            self.answered.append(time.perf_counter())
            self.check(number, index, status, answer)
        if streams:
            streams[1].close()

    def check(self, number: int, index: int, status: int, answer: bytes) -> None:
        """Each probability is the model's own, and none that is larger is missing."""
        if status != 200:
            self.wrong.append(f"request {number}: {status} {answer[:100]!r}")
            return
        expected, given = self.expected[index], json.loads(answer)["answers"]
        classes = [one["class"] for one in given]
        off = max(abs(expected[one["class"]].item() - one["probability"]) for one in given)
        rest = expected.clone()
        rest[classes] = 0
        missed = rest.max().item() - given[-1]["probability"]
        if len(set(classes)) != 5 or off > TOLERANCE or missed > TOLERANCE:
            self.wrong.append(f"request {number}: off by {off:.2g}, a class {missed:.2g} likelier is missing")

    async def ask(self, method: str, path: str) -> tuple[int, bytes]:
        streams = await asyncio.open_connection("127.0.0.1", self.port)
        status, answer, _ = await exchange(*streams, method, path, "", b"")
        streams[1].close()
        return status, answer

    async def kill(self, part: float) -> None:
        """Kill a worker once that part of the requests is under way, and note when another can answer."""
        while self.done() < part:
            await asyncio.sleep(0.05)
        victim = workers(self.server.pid)[0]
        os.kill(victim, signal.SIGKILL)
        start, seen = time.perf_counter(), len(self.answered)
        while len(self.answered) <= seen + self.args.concurrent and self.done() < 1:
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
                self.memory.append((len(self.answered), sum(sizes)))
            await asyncio.sleep(0.25)

    def done(self) -> float:
        return sum(self.statuses.values()) / len(self.order) if not self.wrong else 1.0

    def memory_at(self, low: float, high: float) -> float:
        total = len(self.answered)
        return statistics.median(size for seen, size in self.memory if low * total <= seen <= high * total)


def garbage(picture: bytes) -> list[tuple[str, str, str, bytes]]:
    """Requests that must be refused: method, path, further head lines, body."""
    bomb = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(bomb, "PNG")
    form = "Content-Type: multipart/form-data; boundary=x\r\n"
    return [
        ("POST", "/predict", "", b"this is not a picture"),
        ("POST", "/predict", "", picture[: len(picture) // 2]),
        ("POST", "/predict", "", b""),
        ("POST", "/predict", "", bomb.getvalue()),
        ("POST", "/predict", "", os.urandom(20_000)),
        ("POST", "/predict", form, b"--y\r\nno form at all"),
        ("POST", "/predict", form, b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n--x--\r\n'),
        ("POST", "/predict?topk=many", "", picture),
        ("GET", "/predict", "", b""),
        ("POST", "/nowhere", "", picture[:1000]),
    ]


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str, path: str, head: str, body: bytes
) -> tuple[int, bytes, bool]:
    """One request and its answer: status, body, and whether the server closes the connection."""
    lines = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{head}\r\n"
    writer.write(lines.encode() + body)
    await writer.drain()
    answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    fields = dict(line.lower().split(": ", 1) for line in answer.split("\r\n")[1:] if ": " in line)
    content = await reader.readexactly(int(fields["content-length"]))
    return int(answer.split()[1]), content, fields.get("connection") == "close"


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
    """Seconds that a process itself has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine_time() -> tuple[float, float]:
    """Seconds that all processors have computed, and seconds that the host gave to others (Linux)."""
    user, nice, system, _, _, irq, soft, stolen = map(int, Path("/proc/stat").read_text().split()[1:9])
    return tuple(ticks / os.sysconf("SC_CLK_TCK") for ticks in (user + nice + system + irq + soft, stolen))


def resident(pid: int) -> float:
    """MB."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return 0.0


if __name__ == "__main__":
    sys.exit(main())
