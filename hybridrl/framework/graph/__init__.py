"""The stage graph of a step (`stage_graph`, `drawing`) and the timeline of a run (`stage_tracer`, `timeline`)."""
