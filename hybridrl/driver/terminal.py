"""Write texts of models, files and endpoints to the terminal, beside the program's own words.

A terminal obeys control characters: they move the cursor, set its title, or answer as if the user had typed. Every
program writes through `show` and `show_error`, and logs through `TerminalFormatter`, which replace them.
"""

import logging
import re
import sys

# All but the line's end and the tab; also signs that reverse the order of what follows, and halves of surrogate pairs.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
REPLACEMENT = "\ufffd"


def printable(text: str) -> str:
    """Return the text with `REPLACEMENT` for each control character; lines and tabs stay."""
    return CONTROL.sub(REPLACEMENT, text)


def one_line(text: str) -> str:
    """Return `printable` text with a blank for each end of a line and each tab."""
    return printable(text).replace("\n", " ").replace("\t", " ")


def show(text: str) -> None:
    """Write `printable` text to standard output."""
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def show_error(text: str) -> None:
    """Write `printable` text to standard error."""
    sys.stderr.write(printable(text))
    sys.stderr.flush()


class TerminalFormatter(logging.Formatter):
    """Formats records as `printable` text."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's text, its traceback included."""
        return printable(super().format(record))
