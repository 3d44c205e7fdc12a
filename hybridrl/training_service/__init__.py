"""Tinker's API on your own machines.

Clients have the loop; the service trains and samples. `service` has the verbs.
"""
