"""The stage graph: what it is, how it is drawn, when each stage ran."""
