"""Peak memory of a forward pass, measured in a separate process.

In a process that has already run a model, freed memory is reused and hides the peak of the next model. Every
measurement therefore starts a new Python process, which

    1. makes the C library return freed blocks to the system at once. By default it retains some of them, depending on
       their addresses, and the same model needs 81 MB in one run and 100 MB in the next;
    2. imports PyTorch, timm and attendless and runs a Transformer of one small block, so that the libraries' code is
       loaded and their buffers exist;
    3. records its resident memory: the baseline;
    4. builds the model and one batch of images, and runs the forward three times without gradients;
    5. reports the peak of its resident memory during the forwards, minus the baseline.

The figure is what the model adds to a running PyTorch: weights, images and peak activations. On CUDA it is the peak of
the allocator's count, which starts at zero. 1 MB is 10⁶ bytes.

    echo '{"build": "timm:create_model", "arguments": {"model_name": "deit_tiny_patch16_224"}, "size": [224, 224]}' |
        python -c "from attendless.measure.memory import main; main()"
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..plugins import load_plugins, plugin_files, refuse_while_loading
from ..sizes import size_text
from ..sparse import execution, policy

#: Seconds after which a measurement is stopped.
_TIMEOUT = 1800
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


@dataclasses.dataclass(frozen=True)
class Memory:
    """MB above the baseline at the peak, MB of the weights alone, and MB of the whole process at its peak (CPU)."""

    peak: float
    weights: float
    process: float | None


class MemoryFull(UserError):
    """The machine does not have enough memory for the measurement."""


def peak_memory(build: str, arguments: Mapping[str, Any], *, size: tuple[int, int], **more: Any) -> Memory:
    """Measure the model that `build`, a `module:function`, builds from its JSON `arguments`.

    `more` may hold `batch`, `channels`, `threads`, `device` and `dtype`.
    """
    refuse_while_loading("a measurement of memory")
    # The child needs the plug-ins of the user and the same policy for backends.
    same = {"plugins": plugin_files(), "policy": policy()}
    task = {"build": build, "arguments": dict(arguments), "size": list(size), **same, **more}
    command = [sys.executable, "-c", f"from {__name__} import main; main()"]
    try:
        child = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise UserError(f"measuring memory took more than {_TIMEOUT} s and was stopped") from None
    if child.returncode:
        last = (child.stderr.strip().splitlines() or [f"the process ended with code {child.returncode}"])[-1]
        if child.returncode == -9 or any(word in last for word in ("allocate memory", "OutOfMemory", "MemoryError")):
            what = f"batch {more.get('batch', 1)} at {size_text(size)} px"
            raise MemoryFull(f"{what} does not fit: its process ran out of memory. Expected a smaller batch or size")
        raise UserError(f"memory could not be measured: {last}")
    found = Memory(**json.loads(child.stdout.splitlines()[-1]))
    if found.peak < found.weights:
        raise UserError(
            f"memory could not be measured: {found.peak:.1f} MB at the peak is less than the weights "
            f"({found.weights:.1f} MB), because the system took pages from the process. Expected more free memory"
        )
    return found


def measure(task: Mapping[str, Any]) -> Memory:
    """The task of the child process. Call it in a new process only."""
    import torch

    if task.get("threads"):
        torch.set_num_threads(task["threads"])
    load_plugins(task.get("plugins", ()))
    build, device = _resolve(task["build"]), torch.device(task.get("device", "cpu"))
    dtype = getattr(torch, task.get("dtype", "float32"))
    meter: _Resident | _Allocator = _Allocator(device) if device.type == "cuda" else _Resident()
    with execution(task.get("policy", policy())), torch.inference_mode():
        _small_forward(device, dtype)
        meter.settle()
        baseline = meter.now()
        model = build(**task["arguments"]).eval().to(device, dtype)
        images = torch.rand(task.get("batch", 1), task.get("channels", 3), *task["size"], device=device, dtype=dtype)
        meter.settle()
        for _ in range(3):
            model(images)
        peak = meter.peak()
    weights = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    return Memory((peak - baseline) / 1e6, weights / 1e6, None if device.type == "cuda" else peak / 1e6)


def _small_forward(device: Any, dtype: Any) -> None:
    import torch
    from timm.models.vision_transformer import VisionTransformer

    small = VisionTransformer(img_size=32, patch_size=16, embed_dim=64, depth=1, num_heads=1).eval().to(device, dtype)
    small(torch.rand(2, 3, 32, 32, device=device, dtype=dtype))


class _Resident:
    """The resident memory of this process, as the system reports it."""

    def __init__(self) -> None:
        # Blocks of 128 kB and more get separate pages, which are returned when they are freed (glibc only).
        with contextlib.suppress(OSError, AttributeError):
            for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
                ctypes.CDLL(None).mallopt(option, 128 * 1024)

    def settle(self) -> None:
        """Return free memory and reset the peak: building a model may need more memory than running it.

        Linux only; on other systems the peak includes building the model.
        """
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def now(self) -> int:
        return _table("/proc/self/status", "VmRSS") or self.peak()

    def peak(self) -> int:
        found = _table("/proc/self/status", "VmHWM")
        if found is not None:
            return found
        try:
            import resource
        except ImportError:
            raise UserError("this system does not report the peak memory of a process") from None
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class _Allocator:
    """The memory allocated by PyTorch's CUDA allocator."""

    def __init__(self, device: Any) -> None:
        import torch

        self.device, self.cuda = device, torch.cuda

    def settle(self) -> None:
        gc.collect()
        self.cuda.reset_peak_memory_stats(self.device)

    def now(self) -> int:
        return self.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        return self.cuda.max_memory_allocated(self.device)


def available() -> int | None:
    """Bytes that the system can allocate without swapping (Linux); None elsewhere."""
    return _table("/proc/meminfo", "MemAvailable")


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
    print(json.dumps(dataclasses.asdict(measure(json.load(sys.stdin)))))
