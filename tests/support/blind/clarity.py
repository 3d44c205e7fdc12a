"""Whether a run that failed says why: one error, what the reader may do, and nothing else after it."""

import re

ERROR = re.compile(r"^(error: |terminated|interrupted)")
SUMMARY = re.compile(r"^(the full traceback is in |.*error\.log cannot be written )|( so|;) the (program|job) ends\b")
RESTARTED = re.compile(r"the supervisor (restarts|starts) ")  # what came before belongs to the earlier driver
NOISE = re.compile(
    r"^Traceback \(most|^Exception ignored|^Fatal Python error|^terminate called|^\[[^]]+ [EFC] \d+ \d+\]"
)
WAY_OUT = re.compile(
    r"\b(again|resumes?|restart|raise|lower|set|free|correct|choose|unset|shows|logs are in|the next run starts)\b",
    re.IGNORECASE,
)
MISTAKE = 2  # exit code of a mistake in the command, whose error has no prefix


def find_unclear(text: str, code: int) -> str:
    """Return what is wrong with the error of a failed run, "" if nothing is.

    Args:
        text: What it wrote to stderr.
        code: Its exit code, not 0.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if noise := next((line for line in lines if NOISE.match(line)), ""):
        return f"not our words: {noise[:200]}"
    newest = max((number for number, line in enumerate(lines) if RESTARTED.search(line)), default=-1)
    ends = [number for number in range(newest + 1, len(lines)) if ERROR.match(lines[number])]
    if len(ends) > 1:
        return f"{len(ends)} errors: " + " | ".join(lines[number][:100] for number in ends)
    if ends:
        said, after = [lines[ends[0]]], lines[ends[0] + 1 :]
    elif lines and (code == MISTAKE or SUMMARY.search(lines[-1])):
        said, after = [lines[-1]], []
    else:
        return f"no error; the last line: {lines[-1][:200] if lines else ''}"
    if other := next((line for line in after if not SUMMARY.search(line)), ""):
        return f"the error is not the end: {other[:200]}"
    return "" if WAY_OUT.search(" ".join([*said, *after])) else f"no way out: {said[0][:300]}"
