"""The driver process: supervisor, lifecycle, termination, its Ray cluster."""
