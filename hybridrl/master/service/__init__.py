"""The master actor, its client, its journal and the console commands that read it."""
