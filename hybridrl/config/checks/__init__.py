"""Rules over several settings."""
