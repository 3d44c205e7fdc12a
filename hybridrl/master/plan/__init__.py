"""From a job specification to a plan: pools, slots, ranks. Pure: starts nothing."""
