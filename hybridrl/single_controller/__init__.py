"""Worker groups: one driver calls a group of worker processes as if it were one object."""
