"""Weights of vLLM's model: how pushes and adapters enter it, and kernels that keep them as they were pushed."""
