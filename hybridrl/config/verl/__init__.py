"""Command lines of verl: which of its keys have another name here, are done anyway, have no effect, or are refused.

`table` has the rows, `worker_rows` and `program_rows` are its halves, `take_over` applies them to a command line.
"""
