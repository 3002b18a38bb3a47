"""pt2: `torch.export`'s own format, with attendless's operators in it; loading it needs `import attendless`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UserError
from . import description
from .description import KEY, Description


def open_file(path: Path, threads: int | None = None) -> tuple[Callable[[Tensor], tuple[Tensor, ...]], Description]:
    if threads:
        torch.set_num_threads(threads)
    extra = {KEY: ""}
    try:
        module = torch.export.load(path, extra_files=extra).module()
    except Exception as error:
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise UserError(f"{str(path)!r} is damaged or not a .pt2 file: {reason}") from None
    found = description.read(extra[KEY], path)

    def run(images: Tensor) -> tuple[Tensor, ...]:
        with torch.inference_mode():
            return tuple(module(images))

    return run, found
