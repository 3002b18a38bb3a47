"""The temporary folder of a page. gradio chooses its folders when it is imported, so this module does not import it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def own_folder() -> Iterator[None]:
    """Inside, gradio stores uploads in a folder of its own, which is removed afterwards, and sends no analytics."""
    with tempfile.TemporaryDirectory(prefix="attendless-explore-") as folder:
        ours = {"GRADIO_TEMP_DIR": folder, "GRADIO_ANALYTICS_ENABLED": "False"}
        before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
