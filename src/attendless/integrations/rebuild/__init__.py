"""timm's VisionTransformer and Hugging Face's ViTs, rebuilt as an attendless backbone with the same weights."""
