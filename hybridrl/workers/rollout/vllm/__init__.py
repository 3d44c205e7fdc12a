"""The vLLM rollout. This is the only package that imports vllm."""
