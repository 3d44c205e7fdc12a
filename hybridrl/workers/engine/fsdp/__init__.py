"""The FSDP2 engine."""
