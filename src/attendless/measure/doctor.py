"""What this installation and this machine can do, found by trying rather than by asking."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import signal
import subprocess
import sys

import torch

from ..stamp import cores, stamp

#: Extra → what has to be importable for it, and what it serves.
EXTRAS = {
    "show": (("matplotlib",), "figures"),
    "app": (("matplotlib", "gradio"), "explore, in the browser"),
    "hf": (("transformers",), "converting Hugging Face models"),
    "dense": (("pycocotools", "segmentation_models_pytorch"), "detection and segmentation"),
    "onnx": (("onnx", "onnxscript", "onnxruntime"), "exporting to ONNX, and running it"),
    "openvino": (("onnx", "onnxscript", "onnxruntime", "openvino", "nncf"), "exporting to OpenVINO, and running it"),
    "serve": (("fastapi", "uvicorn", "python_multipart", "prometheus_client"), "serving over HTTP"),
    "cluster": (("ray", "pyarrow"), "predictions in Parquet files, and work on a cluster"),
}
_BF16 = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); print(float((a @ a)[0, 0]))"


@dataclasses.dataclass(frozen=True)
class Finding:
    name: str
    value: str
    note: str = ""
    ok: bool = True


def examine() -> list[Finding]:
    """Every check, in reading order. Anything that could kill the process is tried in a child."""
    return [*_versions(), *_machine(), _kernels(), _openmp(), _bf16(), _compiler(), _triton(), *_extras()]


def _versions() -> list[Finding]:
    names = ("attendless", "torch", "torchvision", "timm", "accelerate", "safetensors", "numpy")
    return [Finding("python", sys.version.split()[0])] + [Finding(name, _version(name)) for name in names]


def _machine() -> list[Finding]:
    found = stamp()
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    wanted, most = torch.get_num_threads(), cores()
    note = "more threads than cores: expect stalls of milliseconds; set --threads" if wanted > most else ""
    return [
        Finding("CPU", found["cpu"], " ".join(found["instructions"])),
        Finding("threads", f"{wanted} of {most} cores", note, ok=not note),
        Finding("torch's CPU path", found["torch_capability"]),
        Finding("CUDA", cuda, "" if cuda != "none" else "everything runs on the CPU"),
    ]


def _kernels() -> Finding:
    from ..sparse import native

    if native.available:
        note = f"instruction sets here: {', '.join(native.instruction_sets())}"
        return Finding(
            "native kernels", str(native.instruction_set()), "; ".join(filter(None, (note, native.threading())))
        )
    return Finding("native kernels", "absent", native.reason, ok=False)


def _openmp() -> Finding:
    """Two runtimes in one process have two pools of threads, which take each other's cores."""
    from ..sparse import native  # noqa: F401 - loads the kernels, and with them their runtime

    found = openmp_runtimes(_loaded_libraries())
    note = "two pools of threads take each other's cores: set OMP_NUM_THREADS, or build torch and attendless alike"
    return Finding("OpenMP runtimes", ", ".join(found) or "none", note if len(found) > 1 else "", ok=len(found) < 2)


def openmp_runtimes(libraries: list[str]) -> list[str]:
    """The different files among loaded libraries that are OpenMP runtimes."""
    names = ("libgomp", "libiomp", "libomp.", "libomp-")
    return sorted({path for path in libraries if os.path.basename(path).startswith(names)})


def _loaded_libraries() -> list[str]:
    try:
        with open("/proc/self/maps") as maps:
            return [line.split(maxsplit=5)[5].strip() for line in maps if ".so" in line]
    except (OSError, IndexError):  # no Linux
        return []


def _bf16() -> Finding:
    """Some CPUs announce instructions for bf16 and die on them; torch cannot tell, so a child process tries."""
    child = _try(dict(os.environ))
    if child.returncode == 0:
        return Finding("bf16 products", "work", "tried in a child process")
    how = signal.Signals(-child.returncode).name if child.returncode < 0 else f"exit code {child.returncode}"
    limited = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    if _try(limited).returncode == 0:
        note = "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before torch is imported, or stay in fp32"
    else:
        note = "stay in fp32"
    return Finding("bf16 products", f"die with {how}", note, ok=False)


def _try(environment: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", _BF16], env=environment, capture_output=True, check=False)


def _compiler() -> Finding:
    """FlexAttention and torch.compile need a C++ compiler on the CPU, our kernels in OpenVINO too."""
    import shutil

    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    found = next((name for name in names if name and shutil.which(name)), None)
    note = "" if found else "torch.compile on the CPU needs one, and so do our kernels in OpenVINO"
    return Finding("C++ compiler", found or "none", note, ok=found is not None)


def _triton() -> Finding:
    """For GPUs there is a kernel that was only ever interpreted."""
    note = "foveal's kernel for GPUs equals the definition in Triton's interpreter; no GPU has timed it yet: "
    note += "`python benchmarks/attention.py --device cuda` would"
    return Finding("Triton", _version("triton"), note)


def _extras() -> list[Finding]:
    rows = []
    for extra, (modules, purpose) in EXTRAS.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        value = "installed" if not missing else "not installed"
        hint = f": pip install 'attendless[{extra}]' ({', '.join(missing)} missing)" if missing else ""
        rows.append(Finding(f"extra {extra}", value, purpose + hint))
    return rows


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
