"""Micro-batches: from rows to the model's input tokens, and from its outputs back to rows."""
