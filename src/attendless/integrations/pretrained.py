"""Fetch timm's pretrained weights, or use the cached ones; without a network, fail within seconds."""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import timm

from ..errors import UserError

#: Timeout in seconds of the first request to the server.
_PATIENCE = 5.0


def create_pretrained(name: str, **arguments: Any) -> Any:
    """Create timm's model `name` with its pretrained weights."""
    with offline_if_unreachable():
        try:
            return timm.create_model(name, pretrained=True, **arguments)
        except UserError:
            raise
        except Exception as error:  # each library involved raises its own types
            why = " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
            raise UserError(
                f"the pretrained weights of {name!r} could not be fetched: {why}. If they are in a file, give it as "
                "weights (--weights F)"
            ) from None


@contextlib.contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Set Hugging Face's library offline if its server does not respond. It would otherwise retry for most of a minute
    before it uses its cache."""
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
    """Whether a server responds at `address`, with any status; uses the proxies of the environment."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_PATIENCE):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
