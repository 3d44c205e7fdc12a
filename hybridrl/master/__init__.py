"""The master and submitted jobs: monitoring, failure decisions, job descriptions, placement and restarts.

Knows no algorithm and does not import torch.
"""
