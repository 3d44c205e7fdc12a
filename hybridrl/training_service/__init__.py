"""Tinker's API on your own machines: clients have the loop, the service trains and samples. `service` has the verbs."""
