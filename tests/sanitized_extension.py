"""A pytest plugin: the tests of this run use the OpenVINO extension that $ATTENDLESS_EXTENSION names."""

from __future__ import annotations

import os
from pathlib import Path

from attendless.export import extension

extension._library = lambda: Path(os.environ["ATTENDLESS_EXTENSION"])
