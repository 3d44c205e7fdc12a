"""Python's garbage collector in a process that starts: it collects seldom until the models are loaded.

While torch, transformers and vLLM are imported, Python's own thresholds let the collector look at their objects over a
thousand times and find nothing: a fifth of the time until a model is loaded. A program that trains nothing, such as
`main_eval`, goes on collecting seldom.
"""

import gc

STARTUP_THRESHOLD = 50_000  # new objects between two collections; Python 3.11 has 700
USUAL_THRESHOLDS = gc.get_threshold()


def collect_seldom() -> None:
    """Let the collector run seldom, until `collect_as_usual`."""
    gc.set_threshold(STARTUP_THRESHOLD)


def collect_as_usual() -> None:
    """End what `collect_seldom` began; without it, do nothing."""
    if gc.get_threshold()[0] == STARTUP_THRESHOLD:
        gc.set_threshold(*USUAL_THRESHOLDS)
