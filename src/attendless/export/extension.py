"""attendless's kernels as an OpenVINO extension: one library, built for the OpenVINO that is installed.

    core = openvino.Core()
    extension.add_to(core)                              # or core.add_extension("libattendless_openvino.so")
    core.read_model("model.onnx"), core.read_model("model.xml")

Its operators are the nodes of the domain `attendless` that `sparse.table` describes, read from ONNX files and from
OpenVINO IR. The attribute `given` lists the names of a node's inputs in order, with commas between. Queries, keys and
values come as q, k, v [B, H, N, D]; as q, k, v [B, N, H, D] with `order="BNHD"`; or, where `given` says `qkv`, as one
tensor [B, N, 3, H, D]. The result is laid out as they are, for qkv as [B, N, H, E], so that nothing is transposed:
`fuse_qkv.pack` rewrites a graph that way. Keys of MergeTokens may be [B, N, D], or `qkv` too. Queries, keys and values
are f32 or bf16, and the result of an attention is of their type; other floats are f32, integers i32 or i64. OpenVINO
decides how many threads compute. Its infer() on one thread drops exceptions thrown during inference; start_async() and
wait() raise them (docs/operators.md).

The library contains the kernels. It can be copied together with a model to a machine without attendless; it needs the
version of OpenVINO it was built for. Building takes seconds and a C++ compiler, once for each version of OpenVINO and
attendless: the library is cached in the cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

from .. import compiled
from ..errors import UserError
from ..storage import atomic, cache_folder

#: The library's name, also beside an exported model.
NAME = "libattendless_openvino.so"
_VERSION = Path("include", "openvino", "core", "version.hpp")
_FLAGS = ["-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"]
_LINK = ["-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-Wl,-z,defs", "-Wl,--strip-all"]


def path() -> Path:
    """The built library. A UserError says why there is none."""
    found = _made()
    if isinstance(found, str):
        raise UserError(f"attendless's OpenVINO extension is not available: {found}")
    return found


def available() -> str:
    """Why there is no extension; empty if there is. It is built if it has to be."""
    found = _made()
    return found if isinstance(found, str) else ""


def add_to(core: Any) -> None:
    """Give an `openvino.Core` the operators."""
    core.add_extension(str(path()))


@lru_cache(maxsize=1)
def _made() -> Path | str:
    """The library, or why there is none."""
    try:
        return _library()
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"it cannot be kept: {error}"


def _library() -> Path:
    if not compiled.available:
        raise UserError(f"the native kernels are not available: {compiled.reason}")
    sources, openvino = Path(compiled.kernels().__file__).parent / "native", _openvino()
    if not (sources / "libattendless.a").is_file():
        raise UserError(f"{str(sources)!r} holds no kernels to build it from: install attendless again")
    target = cache_folder() / "extensions" / _key(openvino, sources) / NAME
    if not target.is_file():
        _build(target, sources, openvino)
    return target


def _openvino() -> Path:
    """The folder of an OpenVINO that can be built against."""
    spec = importlib.util.find_spec("openvino")
    if spec is None or not spec.origin:
        raise UserError("openvino is not installed: pip install 'attendless[openvino]'")
    folder = Path(spec.origin).parent
    needed = [folder / "include" / "tbb" / "parallel_for.h", folder / _VERSION, *_libraries(folder)]
    if len(needed) < 4 or not all(file.is_file() for file in needed):
        raise UserError(f"the openvino in {str(folder)!r} comes without the headers and libraries that pip's has")
    return folder


def _libraries(openvino: Path) -> list[Path]:
    """In a process that infers they are loaded, so where they lie is not kept in ours."""
    return [*(openvino / "libs").glob("libopenvino.so*"), *(openvino / "libs").glob("libtbb.so*")]


def _key(openvino: Path, sources: Path) -> str:
    """What a library is built from, as a short text. Asked of files: importing OpenVINO takes a second."""
    text, digest = (openvino / _VERSION).read_bytes(), hashlib.blake2b(digest_size=8)
    for part in (text, *(file.read_bytes() for file in sorted(sources.iterdir()))):
        digest.update(part)
    numbers = re.findall(rb"define OPENVINO_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", text)
    return f"openvino-{b'.'.join(numbers).decode()}-{digest.hexdigest()}"


def _abi(openvino: Path) -> list[str]:
    """The C++ library's interface that OpenVINO was built with: its strings must be ours."""
    config = openvino / "cmake" / "OpenVINOConfig.cmake"
    text = config.read_text(errors="replace") if config.is_file() else ""
    found = re.search(r'set\(OpenVINO_GLIBCXX_USE_CXX11_ABI\s+"?([01])"?\)', text)
    return [f"-D_GLIBCXX_USE_CXX11_ABI={found[1]}"] if found else []


def _build(target: Path, sources: Path, openvino: Path) -> None:
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    compiler = next((found for name in names if name and (found := shutil.which(name))), None)
    if compiler is None:
        raise UserError("there is no C++ compiler to build it with: install g++ or clang++")
    inputs = [sources / "openvino.cpp", sources / "libattendless.a", *_libraries(openvino)]
    with atomic(target) as temporary:
        headers = [*_abi(openvino), "-isystem", openvino / "include"]
        command = [compiler, *_FLAGS, *headers, *inputs, *_LINK, "-o", temporary]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace")
        if done.returncode:
            lines = done.stderr.splitlines() or [f"it ended with {done.returncode}"]
            told = next((line for line in lines if "error" in line or "undefined" in line), lines[-1])
            raise UserError(f"{compiler} cannot build it: {told}")
