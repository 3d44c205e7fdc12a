"""The state of a job as pure tables: events, transitions, effects."""
