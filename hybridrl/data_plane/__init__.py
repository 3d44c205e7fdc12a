"""Parts of `hybridrl.protocol`: columns, batches, serialization, sharing between processes, and futures."""
