"""Models outside eager PyTorch: ONNX, OpenVINO and pt2 files, and the runners that open them."""

from . import runtimes  # noqa: F401 - registers them
from .exporting import Exported, export
from .runner import Runner, as_runner, open_runner

__all__ = ["Exported", "Runner", "as_runner", "export", "open_runner"]
