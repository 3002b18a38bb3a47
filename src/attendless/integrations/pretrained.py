"""timm's pretrained weights: fetched, or kept from the last time. Without a network that fails in seconds."""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import timm

from ..errors import UserError

#: Seconds within which whoever has the weights must answer at all.
_PATIENCE = 5.0


def create_pretrained(name: str, **arguments: Any) -> Any:
    """timm's model `name` with its pretrained weights."""
    with offline_if_unreachable():
        try:
            return timm.create_model(name, pretrained=True, **arguments)
        except UserError:
            raise
        except Exception as error:  # every library on the way has its own
            why = " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
            raise UserError(
                f"the pretrained weights of {name!r} could not be fetched: {why}. If they are in a file, give it as "
                "weights (--weights F)"
            ) from None


@contextlib.contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Hugging Face's library tries again and again for the better part of a minute before it says that nobody answers,
    or looks at what it has kept. Asked to stay offline, it looks there at once."""
    try:
        from huggingface_hub import constants
    except ImportError:
        yield
        return
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _answers(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _answers(address: str) -> bool:
    """Whether anybody answers there, whatever the answer; proxies of the environment are used."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_PATIENCE):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
