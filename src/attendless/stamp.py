"""The stamp of every measurement: machine, versions, commit and date. It names no host and no person."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from . import compiled
from .version import __version__

#: Instruction sets that decide which kernels run, as Linux names them.
_INSTRUCTIONS = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx_vnni", "amx_bf16", "asimd", "sve", "bf16")


def stamp(device: torch.device | str = "cpu") -> dict[str, Any]:
    """The machine, versions, commit and date, for measurements on `device`."""
    device = torch.device(device)
    cpu, flags = _cpu()
    found: dict[str, Any] = {
        "cpu": cpu,
        "instructions": [name for name in _INSTRUCTIONS if name in flags],
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "timm", "attendless")},
        "commit": commit(),
        "native_kernels": compiled.instruction_set(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    if device.type == "cuda":
        found["cuda"] = torch.version.cuda
    return found


def stamp_line(found: Mapping[str, Any]) -> str:
    """The stamp as one line, for the foot of a table."""
    kernels = f"native kernels ({found['native_kernels']})" if found["native_kernels"] else "no native kernels"
    threads = f"{found['threads']} thread{'s' if found['threads'] != 1 else ''}"
    commit = f" ({found['commit']})" if found.get("commit") else ""
    device = "" if found["device"] == "cpu" else f"{found['device']} · "
    return (
        f"{device}{found['cpu']} · {found['torch_capability']} · {threads} · torch {found['torch']} · "
        f"timm {found['timm']} · attendless {found['attendless']}{commit} · {kernels} · {found['date']}"
    )


@functools.cache
def commit() -> str | None:
    """The commit of the checkout that runs, with a "+" where its code was changed since; None for an installed copy."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(root)]
        found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "src", "native"], check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip() + "+" * bool(changed)


def processor() -> str:
    """The processor's name."""
    return _cpu()[0]


def instructions() -> frozenset[str]:
    """The instruction sets that the system reports, as Linux names them; empty elsewhere."""
    return _cpu()[1]


def _cpu() -> tuple[str, frozenset[str]]:
    """The processor's name and the instruction sets that the system reports (on Linux; elsewhere only the name).

    Virtual machines shorten the name, so the family and model number that tell generations apart are added.
    """
    name, flags = platform.processor() or platform.machine(), frozenset[str]()
    generation = dict[str, str]()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return name, flags
    for line in lines:
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "model name":
            name = value
        elif key in ("cpu family", "model"):
            generation[key.removeprefix("cpu ")] = value
        elif key in ("flags", "Features"):
            flags = frozenset(value.split())
    about = ", ".join(f"{key} {value}" for key, value in generation.items())
    return (f"{name} ({about})" if about else name), flags


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most_at_once() -> int:
    """The largest number of threads or processes of one kind that a command starts: more would exhaust the machine."""
    return max(64, 4 * cores())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return __version__
