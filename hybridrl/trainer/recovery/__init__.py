"""What a trainer does when a process is lost or an update is not finite."""
