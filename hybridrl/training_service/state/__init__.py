"""Tenants, sessions, operations of models, named weights: in memory and on the disk."""
