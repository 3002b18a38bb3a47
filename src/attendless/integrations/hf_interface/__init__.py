"""Hugging Face's vision models, through transformers' AttentionInterface."""
