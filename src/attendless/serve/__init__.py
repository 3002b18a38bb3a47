"""An HTTP server for image classification with dynamic batching."""

from .run import serve
from .settings import Settings

__all__ = ["Settings", "serve"]
