"""Which keys to look at (patterns, selection), and how to look at only those (operations and their backends)."""

from . import backends  # noqa: F401 - registers them
from .backend import Backend, Case, Choice, register_backend
from .dispatch import choose, execution, policy

__all__ = ["Backend", "Case", "Choice", "choose", "execution", "policy", "register_backend"]
