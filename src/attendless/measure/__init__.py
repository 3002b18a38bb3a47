"""Measuring: speed against the dense model, memory, multiply-accumulates, accuracy, and what each is worth."""
