"""Sampling for all rollout engines: parameters, logits processing, and seeded draws per row."""
