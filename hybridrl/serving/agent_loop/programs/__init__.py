"""Agents that are programs of other people: started for each row, or asking for work."""
