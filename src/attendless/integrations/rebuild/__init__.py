"""timm's VisionTransformer and some Hugging Face ViTs, rebuilt as an attendless backbone with the same weights."""
