"""DI-engine's Parallel on Ray actors."""
