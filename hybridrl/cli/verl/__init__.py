"""`hybridrl import-verl`: launch scripts and command lines of verl as ours, every change explained."""
