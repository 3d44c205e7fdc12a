"""Checkpoints: write, find, verify, and decide whether a run may resume from one."""
