"""Detection: heartbeats, hangs, stragglers, low resources."""
