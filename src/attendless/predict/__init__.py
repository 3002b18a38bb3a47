"""Classification of image files with a model or an exported file, on this machine or on a cluster."""

from .answers import Answer
from .model import Card, Opening, Predictor
from .pictures import find_pictures
from .run import predict

__all__ = ["Answer", "Card", "Opening", "Predictor", "find_pictures", "predict"]
