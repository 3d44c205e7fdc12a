"""First import of every `python -m hybridrl.main_*`: Ctrl-C ends the imports after it without a traceback.

`start` gives Ctrl-C back to Python, and runs the program. Until the workers are ready, garbage is collected seldom.
"""

import signal
import sys
from collections.abc import Callable

from hybridrl.system.collector import collect_seldom

_PROGRAM = getattr(sys.modules["__main__"], "__spec__", None)
_IS_OURS = _PROGRAM is not None and _PROGRAM.name.startswith("hybridrl.main_")
if _IS_OURS:
    collect_seldom()
if _IS_OURS and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a program in the background ignores it
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(main: Callable[[], int]) -> None:
    """Run the program, and exit with its code."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
