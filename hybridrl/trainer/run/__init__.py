"""What surrounds a training loop: run directory, stages, metrics, tracking, console, report."""
