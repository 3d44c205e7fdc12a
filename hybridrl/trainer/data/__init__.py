"""Datasets, prompts and tokenizers."""
