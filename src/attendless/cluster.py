"""A Ray cluster inside a `with` block: one that is running, or one started here."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from typing import Any

from .errors import UserError


@contextlib.contextmanager
def joined(address: str) -> Iterator[Any]:
    """The module `ray`, connected to the cluster at `address` (`local` starts one here, `auto` joins a running one)."""
    try:
        import ray
    except ImportError:
        raise UserError("--ray needs Ray: pip install 'attendless[cluster]'") from None
    with _own_home():
        try:
            dashboard = False if address == "local" else None
            ray.init(address=address, include_dashboard=dashboard, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UserError(f"--ray {address}: cannot connect to a Ray cluster: {error}") from None
        try:
            yield ray
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _own_home() -> Iterator[None]:
    """Keep Ray from writing into the home folder and from reporting usage over the network.

    Inside the `with` block, `HOME` is a temporary folder for the whole process.
    """
    before = {name: os.environ.get(name) for name in ("HOME", "RAY_USAGE_STATS_ENABLED")}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        os.environ.update(HOME=home, RAY_USAGE_STATS_ENABLED="0")
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
