"""Command lines of verl: which of its keys are renamed, done anyway, without effect, or refused.

`table` has the rows, `worker_rows` and `program_rows` are its halves, `take_over` applies them to a command line.
"""
