"""From a batch of rows to micro-batches of tokens, and back."""
