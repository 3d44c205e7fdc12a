"""The Ray cluster of a program: found or started, held for a supervised driver, watched, ended."""
