"""Checks of the files that a command will write, made before any work is done: a file that cannot be written, or that
would destroy another, is reported at once."""

from __future__ import annotations

import argparse
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .arguments import Target

#: Kind of target → the endings that its name may have; other kinds may have any name.
ENDINGS = {
    "model": (".safetensors",),
    "picture": (".png", ".svg", ".pdf"),
    "export": (".onnx", ".xml", ".pt2"),
}
#: Kind of folder → the file that describes the run in it, and the files that the run overwrites.
FOLDERS = {
    "run": (
        "recipe.json",
        ("metrics.jsonl", "best.safetensors", "last.safetensors", "predictor.safetensors", "curves.png", "checkpoints"),
    ),
    "comparison": (
        "contest.json",
        ("results.json", "results.csv", "results.md", "results.tex", "report.html", "conversion.json"),
    ),
    "optimized": (
        "manifest.json",
        ("model.xml", "model.bin", "model.onnx", "model.safetensors", "report.html"),
    ),
}
#: The text for a file without attendless's mark.
FOREIGN = "that attendless did not write; --force replaces it"


def check(args: argparse.Namespace) -> None:
    """Raise `UserError` for the first target that cannot be written as asked."""
    from attendless.errors import UserError

    targets = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items() if isinstance(value, Target)}
    for flag, target in targets.items():
        wrong = (_unfit_folder if target.kind in FOLDERS else _unfit)(target, args) or _clash(flag, targets, args)
        if wrong:
            raise UserError(f"{flag} {str(target)!r}: {wrong}")


def to_standard_output(args: argparse.Namespace) -> bool:
    """Whether a target is standard output, which then must hold nothing else."""
    from attendless.storage import stream

    return any(isinstance(value, Target) and stream(value) == 1 for value in vars(args).values())


def _unfit_folder(target: Target, args: argparse.Namespace) -> str:
    """Why nothing can, or should, be written into this folder; empty if it can."""
    from attendless.ownership import not_ours

    if not target:
        return "expected the name of a folder to write"
    if os.path.lexists(target) and not os.path.isdir(target):
        return "is not a folder: expected the name of a folder to write"
    foreign = None if args.force else not_ours(target, *FOLDERS[target.kind])
    return _no_room(os.path.join(target, "file")) or (f"holds {foreign!r}, a file {FOREIGN}" if foreign else "")


def _unfit(target: Target, args: argparse.Namespace) -> str:
    """Why this target cannot, or should not, be written; empty if it can."""
    from attendless.storage import stream

    if not target:
        return "expected the name of a file to write"
    if stream(target) is not None:
        return ""
    try:
        mode = os.stat(target).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return _wrong_ending(target) or _no_room(target) or _foreign(target, args)
    except (OSError, ValueError) as error:
        return f"cannot be written: {getattr(error, 'strerror', None) or error}"
    if stat.S_ISREG(mode):
        return _wrong_ending(target) or _no_room(target) or _foreign(target, args)
    if stat.S_ISDIR(mode):
        return "is a folder: expected the name of a file to write"
    if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
        return "" if os.access(target, os.W_OK) else "cannot be written: permission denied"
    return "is neither a file nor a pipe"


def _wrong_ending(target: Target) -> str:
    endings = ENDINGS.get(target.kind, ())
    good = not endings or Path(target).suffix.lower() in endings
    return "" if good else f"expected a name that ends in {' or '.join(endings)}"


def _no_room(target: str) -> str:
    """Why no file can be made where `target` is to be, or in the nearest folder above it that exists."""
    folder = Path(os.path.realpath(target)).parent
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        return f"{str(folder)!r} is not a folder"
    try:
        tempfile.TemporaryFile(dir=folder).close()  # the only test that is right for every file system and user
    except OSError as error:
        return f"nothing can be written in {str(folder)!r}: {error.strerror}"
    return ""


def _foreign(target: Target, args: argparse.Namespace) -> str:
    """Which file of another program this command would overwrite; empty if there is none, or with `--force`."""
    from attendless.ownership import is_ours

    suffix, there = Path(target).suffix.lower(), os.path.exists(target)
    kind = suffix if target.kind in ("picture", "export") else target.kind
    if args.force:
        return ""
    if there and not is_ours(target, kind):
        return f"is a file {FOREIGN}"
    beside = [] if target.kind != "export" else _beside(Path(target), args.kernels)
    if there and os.path.getsize(target):  # the weights beside a file that attendless wrote belong to that file
        beside = [file for file in beside if file.suffix == ".so"]
    foreign = [file for file in beside if file.exists() and not is_ours(file, ".so")]
    return f"would overwrite {str(foreign[0])!r}, a file {FOREIGN}" if foreign else ""


def _beside(target: Path, kernels: bool | None) -> list[Path]:
    """The files that an export writes beside its target: weights, and the library with the kernels if it is used."""
    folder = Path(os.path.realpath(target)).parent
    if target.suffix == ".xml":
        from attendless.export.extension import NAME

        return [folder / f"{target.stem}.bin", *([] if kernels is False else [folder / NAME])]
    if target.suffix == ".onnx" and kernels:
        from attendless.export.onnx import LIBRARY

        return [folder / LIBRARY]
    return []


def _clash(flag: str, targets: dict[str, Target], args: argparse.Namespace) -> str:
    """Why a target clashes with another file that this command writes or reads; empty if it does not."""
    target = targets[flag]
    for other, path in targets.items():
        if other != flag and _same(target, path):
            return f"is also the file of {other}"
    return "is a file that this command reads" if any(_same(target, path) for path in _read(args)) else ""


def _read(args: argparse.Namespace) -> Iterator[str]:
    """Every file that the command line names to be read."""
    for name in ("image", "model", "weights", "predictor", "plugin", "plugin_of_command"):
        found = getattr(args, name, None)
        yield from [found] if isinstance(found, str) else found or ()


def _same(one: str, other: str) -> bool:
    if os.path.exists(one) and os.path.exists(other):
        return os.path.isfile(one) and os.path.samefile(one, other)  # a device may be written twice
    return os.path.realpath(one) == os.path.realpath(other)
