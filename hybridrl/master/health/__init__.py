"""Detection of lost processes, hangs, stragglers and low resources."""
