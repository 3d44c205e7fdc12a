"""The driver process: supervisor, lifecycle, SIGTERM handling, Ray cluster, resume command."""
