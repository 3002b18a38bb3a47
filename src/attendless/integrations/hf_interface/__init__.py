"""Hugging Face's vision towers: attendless attentions behind transformers' `AttentionInterface`, in place."""
