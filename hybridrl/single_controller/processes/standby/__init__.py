"""Standby processes: one per node has imported what workers import; lost workers start as its forks."""
