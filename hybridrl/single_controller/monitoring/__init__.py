"""Heartbeats and resource usage of worker processes, lost workers, snapshots that outlive a driver, and traces."""
