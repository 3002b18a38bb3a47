"""A pytest plugin: the tests of this run use the compiled module that $ATTENDLESS_MODULE names."""

from __future__ import annotations

import importlib.util
import os
import sys

_spec = importlib.util.spec_from_file_location("attendless._native", os.environ["ATTENDLESS_MODULE"])
assert _spec is not None
assert _spec.loader is not None
sys.modules["attendless._native"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["attendless._native"])
