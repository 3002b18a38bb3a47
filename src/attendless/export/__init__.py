"""Models outside eager PyTorch: ONNX, OpenVINO, pt2, and whatever opens them again."""

from . import runtimes  # noqa: F401 - registers them
from .exporting import Exported, export
from .runner import Runner, as_runner, open_runner

__all__ = ["Exported", "Runner", "as_runner", "export", "open_runner"]
