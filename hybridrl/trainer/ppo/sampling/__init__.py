"""Samples of a step: filtered, selected, and drawn again until a batch is full."""
