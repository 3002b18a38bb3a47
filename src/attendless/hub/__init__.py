"""Models on the Hugging Face Hub, or in a folder with the same files."""

from .repository import from_hub, push_to_hub

__all__ = ["from_hub", "push_to_hub"]
