"""What a worker reports and what the driver learns about workers: heartbeats, capacity, lost workers, traces."""
