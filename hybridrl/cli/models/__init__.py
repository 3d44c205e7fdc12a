"""Commands about a model: `hybridrl export`, `serve`, `eval`, `chat`."""
