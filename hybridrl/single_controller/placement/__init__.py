"""Placement of workers: pools, plans, placement groups, feasibility."""
