"""The master actor, its client, its journal and the commands that read it."""
