"""Serving: request routing over rollout replicas, agent loops, and the OpenAI-compatible endpoint."""
