"""Divide a bash script into words, arrays and operators, with their quotes. `shell_script.py` follows them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hybridrl.errors import ConfigError

WORD, ARRAY, OPERATOR = "word", "array", "operator"
SEPARATORS = ("\n", ";", ";;", "&&", "||", "|", "&")
OPERATORS = ("&&", "||", ";;", "<<<", "<<", ">>", ">&", "&>", ";", "|", "&", "(", ")", "<", ">")
SIGN = re.compile("\n|" + "|".join(map(re.escape, OPERATORS)))
SKIPPED = re.compile(r"(?:\\\n|[ \t\r]|#.*)*")  # continued lines, blanks, comments
CONTINUED = "\\\n"
WORD_ENDS = " \t\r\n;|&()<>"
PLAIN = re.compile(rf"[^{WORD_ENDS}'\"\\$]*")
ARRAY_HEAD = re.compile(r"([A-Za-z_]\w*)(\+?)=\(")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")


@dataclass(frozen=True)
class Token:
    """A word, an array or an operator.

    Attributes:
        kind: WORD, ARRAY or OPERATOR.
        text: As written.
        parts: Pieces of a word, each with its quote: a single one, a double one, or none.
        name: The variable, of an assignment.
        appends: The assignment is `+=`.
        items: Words of an array.
    """

    kind: str
    text: str
    parts: tuple[tuple[str, str], ...] = ()
    name: str = ""
    appends: bool = False
    items: tuple["Token", ...] = ()

    @property
    def plain(self) -> str:
        """The text of a word without quotes and expansions; empty for others."""
        return self.text if self.kind == WORD and re.fullmatch(r"[\w!{}\[\].:/-]+", self.text) else ""

    @property
    def value(self) -> "Token":
        """The word behind the `=` of an assignment."""
        head = len(ASSIGNMENT.match(self.text)[0])  # type: ignore[index]
        first, quote = self.parts[0]
        return Token(WORD, self.text[head:], ((first[head:], quote), *self.parts[1:]))

    @property
    def is_separator(self) -> bool:
        """Whether the token ends a command."""
        return self.kind == OPERATOR and self.text in SEPARATORS

    @property
    def is_redirection(self) -> bool:
        """Whether the token and the next word redirect output."""
        return self.kind == OPERATOR and self.text[0] in "<>&" and self.text not in SEPARATORS


def tokens(text: str) -> Iterator[Token]:
    """Yield the tokens of a script; comments, continued lines and here-documents are left out.

    Raises:
        ConfigError: A quote or an array is not closed.
    """
    reader = _Reader(_without_here_documents(text))
    while (token := reader.next()) is not None:
        yield token


def _without_here_documents(text: str) -> str:
    ends: list[str] = []
    kept: list[str] = []
    for line in text.splitlines():
        if ends:
            if line.strip() == ends[0]:
                ends.pop(0)
            continue
        ends += [found[2] for found in HERE_DOCUMENT.finditer(line)]
        kept.append(HERE_DOCUMENT.sub("", line))
    return "\n".join(kept) + "\n"


class _Reader:
    def __init__(self, text: str):
        self._text = text
        self._place = 0

    def next(self) -> Token | None:
        self._place = SKIPPED.match(self._text, self._place).end()  # type: ignore[union-attr] # it matches nothing, too
        if self._place >= len(self._text):
            return None
        if sign := SIGN.match(self._text, self._place):
            self._place = sign.end()
            return Token(OPERATOR, sign[0])
        if head := ARRAY_HEAD.match(self._text, self._place):
            return self._array(head)
        start, parts = self._place, []
        while self._text[self._place : self._place + 1] not in WORD_ENDS:  # at the end, too
            if self._text.startswith(CONTINUED, self._place):
                self._place += len(CONTINUED)
            else:
                parts.append(self._part())
        text = self._text[start : self._place].replace(CONTINUED, "")
        assigned = ASSIGNMENT.match(text)
        name, sign_of_more = (assigned[1], assigned[2]) if assigned else ("", "")
        return Token(WORD, text, tuple(parts), name=name, appends=bool(sign_of_more))

    def _array(self, head: re.Match[str]) -> Token:
        self._place = head.end()
        items: list[Token] = []
        while (token := self.next()) is not None:
            if token.text == ")" and token.kind == OPERATOR:
                text = self._text[head.start() : self._place]
                return Token(ARRAY, text, name=head[1], appends=bool(head[2]), items=tuple(items))
            if token.kind == WORD:
                items.append(token)
        raise ConfigError(f"{head[0]}: the array is not closed")

    def _part(self) -> tuple[str, str]:
        quote = self._text[self._place]
        if quote in "'\"":
            start = self._place + 1
            end = self._closing(quote, start)
            self._place = end + 1
            inner = self._text[start:end]
            return (inner if quote == "'" else re.sub(r"\\(?:\n|([\"\\`]))", r"\1", inner), quote)
        if quote == "\\":
            self._place += 2
            return self._text[self._place - 1], "'"
        start = self._place
        if quote == "$" and self._text[start + 1 : start + 2] in ("{", "("):
            self._place = bracket_end(self._text, start + 1)
        else:
            self._place = PLAIN.match(self._text, start + 1).end()  # type: ignore[union-attr] # it matches nothing, too
        return self._text[start : self._place], ""

    def _closing(self, quote: str, start: int) -> int:
        place = start
        while place < len(self._text) and self._text[place] != quote:
            if quote == '"' and self._text.startswith("$(", place):
                place = bracket_end(self._text, place + 1)
            else:
                place += 2 if quote == '"' and self._text[place] == "\\" else 1
        if place >= len(self._text):
            raise ConfigError(f"{self._text[start - 1 :].splitlines()[0]}: the quote is not closed")
        return place


def bracket_end(text: str, start: int) -> int:
    """Return the place behind the bracket that closes the one at `start`.

    Raises:
        ConfigError: There is none.
    """
    opening, closing, depth = text[start], {"{": "}", "(": ")"}[text[start]], 0
    for place in range(start, len(text)):
        depth += (text[place] == opening) - (text[place] == closing)
        if depth == 0:
            return place + 1
    raise ConfigError(f"{text[start - 1 :].splitlines()[0]}: a bracket is not closed")
