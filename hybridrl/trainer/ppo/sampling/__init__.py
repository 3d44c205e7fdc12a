"""Which samples a step trains on: filtered, selected, and drawn again until a batch is full."""
