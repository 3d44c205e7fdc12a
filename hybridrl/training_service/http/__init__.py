"""The training service over HTTP: Tinker's routes below `/api/v1`."""
