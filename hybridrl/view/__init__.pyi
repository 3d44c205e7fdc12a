from .command import show_runs as show_runs
