"""A web page about one or more runs: curves, samples, settings, timeline, failures.

`hybridrl view` starts it. It reads what a run has written, on a local disk or any fsspec path, and writes nothing. It
loads neither torch nor Ray.

    readers            a run's directory as data, one module per view
    runs               which runs there are
    access, server     who may ask, and the routes; `answers` has what each route sends
    page/              HTML, style and scripts; uPlot draws the curves
"""
