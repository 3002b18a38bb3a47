"""Models outside eager PyTorch: ONNX, OpenVINO, pt2, and whatever opens them again."""

from .runner import Runner, as_runner, open_runner

__all__ = ["Runner", "as_runner", "open_runner"]
