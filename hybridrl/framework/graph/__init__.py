"""The stage graph of a step, and the timeline of a run.

`stage_graph` and `drawing`; `stage_tracer` and `timeline`.
"""
