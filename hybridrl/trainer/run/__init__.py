"""What surrounds a training loop: run directory, tracking, console, report."""
