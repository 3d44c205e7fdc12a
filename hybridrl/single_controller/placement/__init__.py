"""Which worker runs where: pools, plans, placement groups, feasibility."""
