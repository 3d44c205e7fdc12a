"""Score competition mathematics: the last boxed answer against the reference.

They are compared as mathematics, not as text.

`math-verify` (https://github.com/huggingface/Math-Verify) reads and compares the answers. Its own time limits use
signals, which work in the main thread only and replace a caller's alarm. They are switched off: the caller limits the
time (`hybridrl.rewards` does, with killable processes). Not scored: the steps, and whether an answer is simplified.
"""

import logging
import re
from functools import lru_cache
from inspect import signature
from typing import Any

BOX = re.compile(r"\\(?:boxed|fbox)\s*")
PERCENT = re.compile(r"\\?%")


def compute_score(solution_str: str, ground_truth: str) -> float:
    """Return 1.0 if the last boxed answer of `solution_str` equals `ground_truth`, else 0.0.

    `ground_truth` is LaTeX without the box, or a whole reference solution with one.
    """
    answer = last_boxed(solution_str)
    if answer is None:
        return 0.0
    truth = last_boxed(ground_truth)
    return float(equal(answer, ground_truth if truth is None else truth))


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` or `\fbox{...}`, or None.

    Its braces are balanced.

    A box that never closes gives None. TeX's other form `\boxed 7` has the one character (or command) that follows.
    """
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if text[start : start + 1] != "{":
        token = re.compile(r"\\[a-zA-Z]+|[^\s$]").match(text, start)
        return token.group() if token else None
    depth = 0
    for brace in re.compile(r"(?<!\\)(?:\\\\)*[{}]").finditer(text, start):
        depth += 1 if brace.group()[-1] == "{" else -1
        if depth == 0:
            return text[start + 1 : brace.end() - 1].strip()
    return None


def equal(answer: str, truth: str) -> bool:
    """Return whether two LaTeX answers are equal: letter by letter, or as parsed by math-verify.

    Signs of percent are dropped from both, as MATH's own scorer does: its answers have them or not.
    """
    answer, truth = (PERCENT.sub("", text) for text in (answer, truth))
    if not answer or not truth:
        return False
    if answer == truth:
        return True
    verifier = math_verify()
    config = [verifier.LatexExtractionConfig()]
    gold, given = (verifier.parse(rf"\boxed{{{text}}}", config, parsing_timeout=None) for text in (truth, answer))
    return verifier.verify(gold, given, timeout_seconds=None)


@lru_cache(maxsize=1)
def math_verify() -> Any:
    """Return the math-verify module, imported at the first use (it brings sympy).

    Its warnings about the missing time limit are silenced.
    """
    import math_verify as module

    if "parsing_timeout" not in signature(module.parse).parameters:
        raise ImportError(
            "math-verify is too old (it takes unequal texts for equal); run: pip install -U 'math-verify>=0.9'"
        )
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return module
