"""Sampling: parameters, logits processing, seeded draws per row."""
