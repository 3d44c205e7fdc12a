"""The training worker: passes, steps, samples. It knows no sessions and no keys."""
