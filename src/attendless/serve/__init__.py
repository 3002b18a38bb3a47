"""A small server: a picture in, answers out, in batches."""

from .run import serve
from .settings import Settings

__all__ = ["Settings", "serve"]
