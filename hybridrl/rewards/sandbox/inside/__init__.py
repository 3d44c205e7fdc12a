"""The program of a sandbox's first process. It imports only the standard library, and runs without site packages."""
