"""Which keys to look at (patterns, selection), and how to look at only those (operations and their executors)."""

from . import executors  # noqa: F401 - registers them
from .dispatch import choose, execution, policy
from .executor import Case, Choice, Executor, register_executor

__all__ = ["Case", "Choice", "Executor", "choose", "execution", "policy", "register_executor"]
