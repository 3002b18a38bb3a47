"""Images: folders, data sets by name, the included data set `scenes`, and a cache of decoded pixels."""

from .opening import open_data, open_splits
from .source import (
    IGNORE,
    BadImage,
    Source,
    Split,
    load_image,
)

__all__ = ["IGNORE", "BadImage", "Source", "Split", "load_image", "open_data", "open_splits"]
