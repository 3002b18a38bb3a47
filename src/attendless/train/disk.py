"""A disk that is full, or that cannot be written for another reason, while a run is under way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from ..errors import UserError


@contextlib.contextmanager
def goes_on_later(out: Path) -> Iterator[None]:
    """Tell of a failure to write in one line. Every file of a run is whole at any moment, so nothing is lost by it."""
    try:
        yield
    except BrokenPipeError:  # whoever read the messages has left: no concern of the disk's
        raise
    except (OSError, SafetensorError) as error:
        reason, where = getattr(error, "strerror", None) or error, getattr(error, "filename", None) or out
        raise UserError(
            f"cannot write {str(where)!r}: {reason}. Nothing is lost: once this is put right, the same command goes on "
            "where it was"
        ) from None
