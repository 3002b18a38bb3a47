"""The search for the fastest model that keeps its accuracy."""
