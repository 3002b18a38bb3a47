"""Measuring: speed-up over the baseline, memory, multiply-accumulates and accuracy."""
