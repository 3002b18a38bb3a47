"""Models on the Hugging Face Hub, or in a folder as it would be there."""

from .repository import from_hub, push_to_hub

__all__ = ["from_hub", "push_to_hub"]
