"""Several programs, one after the other, in one new process: its imports, seconds of them, are made once."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
MARK = "--- the next program ---"
CODE = f"""
import sys, traceback
for code in sys.argv[1:]:
    try:
        exec(code, {{"__name__": "__main__"}})
        sys.exit(0)
    except SystemExit as end:
        print(end.code)
    except BaseException:
        traceback.print_exc()
        print(1)
    print({MARK!r}, flush=True)
    print({MARK!r}, file=sys.stderr, flush=True)
"""


def run_in_one_process(
    codes: Sequence[str], *, environment: Mapping[str, str] = os.environ, cwd: Path | None = None
) -> list[subprocess.CompletedProcess]:
    """Return exit code and output of each code.

    None may leave a connection or a changed environment to the next.
    """
    command = [sys.executable, "-c", CODE, *codes]
    variables = {**environment, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(command, env=variables, cwd=cwd, capture_output=True, text=True, timeout=100)
    outs, errs = ([part.removeprefix("\n") for part in text.split(MARK)[:-1]] for text in (done.stdout, done.stderr))
    assert len(outs) == len(errs) == len(codes), done.stderr
    ends = []
    for code, out, err in zip(codes, outs, errs, strict=True):
        printed, _, status = out.removesuffix("\n").rpartition("\n")
        ends.append(subprocess.CompletedProcess(code, int(status), printed + "\n" * bool(printed), err))
    return ends
