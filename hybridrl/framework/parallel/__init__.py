"""DI-engine's `Parallel` on Ray actors: groups of processes that exchange events."""
