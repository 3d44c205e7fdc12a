"""Recovery from lost workers, from a lost driver, and from updates that are not finite."""
