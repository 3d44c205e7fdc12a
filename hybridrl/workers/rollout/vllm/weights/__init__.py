"""Weights of vLLM's model: pushes, adapters, and kernels that keep both unchanged."""
