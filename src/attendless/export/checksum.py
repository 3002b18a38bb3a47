"""A digest stored inside the file it belongs to, which detects damaged files.

The description of a file has a field for the digest, which is filled with zeros while the digest is computed.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from ..errors import UserError

#: The field before the digest is computed.
BLANK = "0" * 64
#: The field in JSON, and in JSON inside XML.
_PLACE = re.compile(rb'(?:"|&quot;)digest(?:"|&quot;): (?:"|&quot;)([0-9a-f]{64})')


def seal(path: Path, *others: Path) -> None:
    """Write the digest of `path` and of the files that belong to it into the empty field of `path`."""
    data = bytearray(path.read_bytes())
    place = _place(data)
    if place is None or data[slice(*place)] != BLANK.encode():
        raise ValueError(f"{path} has no empty field for a digest")
    data[slice(*place)] = _digest(data, others)
    path.write_bytes(data)


def check_seal(path: Path, *others: Path) -> None:
    """Raise unless `path` and the files that belong to it match the stored digest."""
    data = bytearray(path.read_bytes())
    place = _place(data)
    if place is None:
        raise UserError(f"{str(path)!r} was not exported by attendless, or is damaged: it has no description")
    found = bytes(data[slice(*place)])
    data[slice(*place)] = BLANK.encode()
    missing = [str(other) for other in others if not other.is_file()]
    if missing:
        raise UserError(f"{str(path)!r} needs {missing[0]!r} beside it: no such file")
    if _digest(data, others) != found:
        raise UserError(f"{str(path)!r} is damaged, or was changed since its export: it does not match its digest")


def _place(data: bytearray) -> tuple[int, int] | None:
    found = _PLACE.search(data)
    return found and found.span(1)


def _digest(data: bytearray, others: tuple[Path, ...]) -> bytes:
    digest = hashlib.blake2b(data, digest_size=32)
    for other in others:
        digest.update(hashlib.blake2b(other.read_bytes(), digest_size=32).digest())
    return digest.hexdigest().encode()
