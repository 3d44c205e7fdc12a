"""`hybridrl init`: a directory to start one's own work in."""
