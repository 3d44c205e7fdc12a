"""What the operating system gives: durable files, JSON lines over a socket, the identity of a machine."""
