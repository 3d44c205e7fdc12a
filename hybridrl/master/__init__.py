"""The master: what a job is made of, where it is placed, and what happens when a part of it dies.

Knows no algorithm, needs no torch.
"""
