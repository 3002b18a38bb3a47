"""Peak memory of a forward, measured in a process of its own.

In a process that has already run something, freed memory is handed out again and the peak belongs to whoever came
first. So a fresh Python is started for every measurement; it

    1. imports PyTorch, timm and attendless, and multiplies two small matrices, so that the libraries' own buffers exist;
    2. notes its resident memory: the baseline;
    3. builds the model and one batch of images, and runs the forward three times without gradients;
    4. reports how far the peak of its resident memory lies above the baseline.

The figure is thus what the model adds to a running PyTorch: weights, images and activations at their peak. On CUDA it is
the peak of the allocator's own count, which starts at nothing. 1 MB is 10⁶ bytes.

    echo '{"build": "timm:create_model", "arguments": {"model_name": "deit_tiny_patch16_224"}, "size": [224, 224]}' |
        /usr/bin/time -v python -m attendless.measure.memory
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError

#: Longer than any forward worth waiting for.
_TIMEOUT = 1800


@dataclasses.dataclass(frozen=True)
class Memory:
    """MB above the baseline at the peak; MB of the weights alone; MB of the whole process at its peak (CPU)."""

    peak: float
    weights: float
    process: float | None


def peak_memory(
    build: str,
    arguments: Mapping[str, Any],
    *,
    size: tuple[int, int],
    batch: int = 1,
    channels: int = 3,
    threads: int | None = None,
    device: str = "cpu",
) -> Memory:
    """Measure the model that `build`, a `module:function`, makes of its JSON-able `arguments`."""
    task = {"build": build, "arguments": dict(arguments), "size": list(size), "batch": batch, "channels": channels}
    task |= {"threads": threads, "device": device}
    command = [sys.executable, "-m", "attendless.measure.memory"]
    try:
        child = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise UserError(f"measuring memory took more than {_TIMEOUT} s and was stopped") from None
    if child.returncode:
        last = (child.stderr.strip().splitlines() or [f"ended with code {child.returncode}"])[-1]
        hint = " (killed: the machine ran out of memory?)" if child.returncode == -9 else ""
        raise UserError(f"memory could not be measured: {last}{hint}")
    return Memory(**json.loads(child.stdout.splitlines()[-1]))


def measure(task: Mapping[str, Any]) -> Memory:
    """What the child does. Call it in a fresh process only."""
    import torch

    if task.get("threads"):
        torch.set_num_threads(task["threads"])
    build = _resolve(task["build"])
    device = torch.device(task.get("device", "cpu"))
    torch.ones(64, 64) @ torch.ones(64, 64)
    if device.type != "cpu":
        torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
        torch.cuda.reset_peak_memory_stats(device)
        baseline = torch.cuda.memory_allocated(device)
    else:
        baseline = resident()

    model = build(**task["arguments"]).eval().to(device)
    weights = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    images = torch.rand(task.get("batch", 1), task.get("channels", 3), *task["size"], device=device)
    if device.type == "cpu":
        forget_peak()
    else:
        torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        for _ in range(3):
            model(images)
    if device.type == "cpu":
        peak, process = peak_resident(), peak_resident() / 1e6
    else:
        peak, process = torch.cuda.max_memory_allocated(device), None
    return Memory((peak - baseline) / 1e6, weights / 1e6, process)


def resident() -> int:
    """Bytes of resident memory now; where the system does not tell, at the peak so far."""
    return _status("VmRSS") or peak_resident()


def peak_resident() -> int:
    """Bytes of resident memory at the peak of this process."""
    found = _status("VmHWM")
    if found is not None:
        return found
    try:
        import resource
    except ImportError:
        raise UserError("this system does not tell a process its peak memory") from None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak() -> None:
    """Start the peak anew, so that building a model, which may need more than running it, does not count (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass  # then the peak includes the building, which is an upper bound


def available() -> int | None:
    """Bytes the system could still give out without swapping, if it tells (Linux)."""
    return _table("/proc/meminfo", "MemAvailable")


def _status(key: str) -> int | None:
    return _table("/proc/self/status", key)


def _table(path: str, key: str) -> int | None:
    """One entry, in bytes, of a `key: N kB` file."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith(f"{key}:")]
    return int(found[0][1]) * 1024 if found else None


def _resolve(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def main() -> None:
    task = json.load(sys.stdin)
    print(json.dumps(dataclasses.asdict(measure(task))))


if __name__ == "__main__":
    main()
