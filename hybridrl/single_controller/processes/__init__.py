"""Worker processes: start, host, reattach, kill."""
