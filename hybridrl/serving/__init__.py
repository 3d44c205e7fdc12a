"""Who asks replicas for tokens: router, agent loops, OpenAI endpoint."""
