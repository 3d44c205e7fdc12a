"""Job state: events, effects, state tables and the reducer."""
