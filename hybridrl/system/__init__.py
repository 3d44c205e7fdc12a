"""Operating system: durable files, child processes, JSON lines over a socket, a machine's identity."""
