"""Events within a task: listeners, labels, and the router that a process without peers has."""
