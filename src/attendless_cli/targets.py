"""Checks of the files that a command will write, made before any work is done: a file that cannot be written, or that
would destroy another, is reported at once."""

from __future__ import annotations

import argparse
import os
import re
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
#: Kind of target, or the ending of a picture → how a file that attendless wrote begins.
BEGINNINGS = {
    "json": re.compile(rb'\s*\{\s*"stamp":'),
    "page": re.compile(rb"\s*(<!doctype html|<html)", re.IGNORECASE),
    ".png": re.compile(rb"\x89PNG\r\n.{,200}Matplotlib", re.DOTALL),
    ".svg": re.compile(rb"\s*<(\?xml|svg).*(Matplotlib|cc:Agent)", re.DOTALL),
    ".pdf": re.compile(rb"%PDF-1\.\d\n%\xac\xdc \xab\xba"),  # as Matplotlib marks them
}


def check(args: argparse.Namespace) -> None:
    """Raise `UserError` for the first target that cannot be written as asked."""
    from attendless.errors import UserError

    targets = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items() if isinstance(value, Target)}
    for flag, target in targets.items():
        wrong = _unfit(target, args.force) or _clash(flag, targets, args)
        if wrong:
            raise UserError(f"{flag} {str(target)!r}: {wrong}")


def to_standard_output(args: argparse.Namespace) -> bool:
    """Whether a target is standard output, which then must hold nothing else."""
    from attendless.storage import stream

    return any(isinstance(value, Target) and stream(value) == 1 for value in vars(args).values())


def _unfit(target: Target, force: bool) -> str:
    """Why this target cannot, or should not, be written; empty if it can."""
    from attendless.storage import stream

    if not target:
        return "expected the name of a file to write"
    if stream(target) is not None:
        return ""
    try:
        mode = os.stat(target).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return _wrong_ending(target) or _no_room(target)
    except (OSError, ValueError) as error:
        return f"cannot be written: {getattr(error, 'strerror', None) or error}"
    if stat.S_ISREG(mode):
        foreign = "" if force or _ours(target) else "is a file that attendless did not write; --force replaces it"
        return _wrong_ending(target) or _no_room(target) or foreign
    if stat.S_ISDIR(mode):
        return "is a folder: expected the name of a file to write"
    if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
        return "" if os.access(target, os.W_OK) else "cannot be written: permission denied"
    return "is neither a file nor a pipe"


def _wrong_ending(target: Target) -> str:
    endings = ENDINGS.get(target.kind, ())
    good = not endings or Path(target).suffix.lower() in endings
    return "" if good else f"expected a name that ends in {' or '.join(endings)}"


def _no_room(target: Target) -> str:
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


def _ours(target: Target) -> bool:
    """Whether an existing file may be overwritten: it is of the kind that attendless writes, or empty."""
    from attendless.storage import metadata

    if os.path.getsize(target) == 0:
        return True
    if target.kind == "model":
        return "attendless" in metadata(target)
    if target.kind == "export":  # exported files contain the name
        return b"attendless" in Path(target).read_bytes()
    with open(target, "rb") as file:
        start = file.read(4096)
    return bool(BEGINNINGS[Path(target).suffix.lower() if target.kind == "picture" else target.kind].match(start))


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
