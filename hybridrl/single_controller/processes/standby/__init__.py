"""Standby processes: one per node has imported what the workers import, and lost workers start by a fork of it."""
