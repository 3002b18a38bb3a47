"""Errors of a full or read-only disk during a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from ..errors import UserError


@contextlib.contextmanager
def goes_on_later(out: Path) -> Iterator[None]:
    """Report a write error as `UserError`. Files are written atomically, so the run can be resumed."""
    try:
        yield
    except BrokenPipeError:  # the reader of the output has closed it
        raise
    except (OSError, SafetensorError) as error:
        reason, where = getattr(error, "strerror", None) or error, getattr(error, "filename", None) or out
        raise UserError(
            f"cannot write {str(where)!r}: {reason}. Nothing is lost: after the correction, the same command "
            "resumes the run"
        ) from None
