"""Read the commands of a bash script without running it.

`script_commands` follows assignments, arrays, `${NAME:-default}`, `$((1024 * 4))`, `if`, `case`, `&&` and `||`, and
`$(...)` as far as `_printed` knows its commands. What it cannot know without running something (other commands, loops,
functions) becomes a mark in the text, so that no value that depends on it is made up. `command.py` uses it; it is no
shell.
"""

import ast
import fnmatch
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import PathFinder

from hybridrl.cli.verl.shell_words import ARRAY, Token, bracket_end, tokens
from hybridrl.errors import ConfigError

UNKNOWN = "\0"  # encloses what could not be resolved
END_WORDS = {"if": "fi", "case": "esac", "for": "done", "while": "done", "until": "done", "{": "}"}
MAX_CHARS = 1 << 20  # of a variable: each assignment may double it
TESTS = ("[", "[[", "test")
DECLARATIONS = ("export", "local", "readonly", "declare")
NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
    "-lt": int.__lt__,
    "-le": int.__le__,
}


def script_commands(text: str, environment: Mapping[str, str], *, arguments: list[str]) -> list[list[str]]:
    """Return the words of each command that a bash script would run, in its order.

    Args:
        text: The script.
        environment: Values of variables that the script does not set.
        arguments: The script's own arguments, which `"$@"` stands for.

    Raises:
        ConfigError: A quote or a bracket is not closed.
    """
    script = _Script(environment, arguments)
    script.run(list(tokens(text)))
    return script.commands


def unresolved(word: str) -> list[str]:
    """Return what a word depends on and could not be resolved, such as `$(date)`."""
    return re.findall(f"{UNKNOWN}([^{UNKNOWN}]*){UNKNOWN}", word)


@dataclass
class _Script:
    environment: Mapping[str, str]
    arguments: list[str]
    values: dict[str, list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)

    def run(self, code: list[Token]) -> bool | None:
        """Follow the commands of `code`, one after another; return the last one's status, None if it is unknown."""
        status: bool | None = True
        for link, command in _linked_commands(code):
            if link == ";" or status is None or status == (link == "&&"):
                done = self._command(command)
                status = done if link == ";" or status is not None else None
                if link != ";" and status is None:
                    self._forget(command)
        return status

    def _command(self, command: list[Token]) -> bool | None:
        """Follow one command; return its status, None if it is unknown."""
        first = command[0].plain
        if first == "if":
            self._if(command)
        elif first == "case":
            self._case(command)
        elif first in END_WORDS or (len(command) > 1 and command[1].text == "("):
            self._forget(command)
        elif first in TESTS:
            return self._test([word for token in command for word in self.words(token, split=False)])
        else:
            self._simple(command)
        return True

    def _simple(self, command: list[Token]) -> None:
        words = list(command)
        while words and words[0].plain in DECLARATIONS:
            words = words[1:]
        while words and words[0].name:
            self._assign(words.pop(0))
        if words:
            self.commands.append([word for token in _without_redirections(words) for word in self.words(token)])

    def _assign(self, token: Token) -> None:
        if token.kind == ARRAY:
            self._set(token, [word for item in token.items for word in self.words(item)])
        else:
            self._set(token, ["".join(self.words(token.value, split=False))])

    def _set(self, token: Token, found: list[str]) -> None:
        """Give a variable its value. A text that is appended lengthens the first item."""
        value = [*(self._value(token.name) if token.appends else []), *found]
        if token.kind != ARRAY and len(value) > 1:
            value = [value[0] + found[0], *value[1:-1]]
        if sum(map(len, value)) + len(value) > MAX_CHARS:
            raise ConfigError(f"{token.name}: has more than {MAX_CHARS} characters; write the command without it")
        self.values[token.name] = value

    def _if(self, command: list[Token]) -> None:
        for condition, body in _branches(command):
            status = True if condition is None else self._condition(condition)
            if status is None:
                assert condition is not None
                self._forget(command, f"if {' '.join(token.text for token in condition if token.parts)}")
                return
            if status:
                self.run(body)
                return

    def _condition(self, code: list[Token]) -> bool | None:
        """Return whether a condition holds, from its tests; None if they do not decide it.

        Tests change nothing, so that one which can be decided may decide for an unknown one before it.
        """
        status: bool | None = True
        for link, command in _linked_commands(code):
            decisive = {"&&": False, "||": True}.get(link)
            if decisive is None or status is not decisive:
                found = self._condition_part(command)
                status = found if decisive is None or status is not None or found is decisive else None
        return status

    def _condition_part(self, command: list[Token]) -> bool | None:
        """Return the status of a test, or of tests in braces."""
        if command[0].plain == "{" and command[-1].plain == "}":
            return self._condition(command[1:-1])
        if command[0].plain in TESTS:
            return self._test([word for token in command for word in self.words(token, split=False)])
        return None

    def _test(self, words: list[str]) -> bool | None:
        inner = [word for word in words if word not in (*TESTS, "]", "]]")]
        if any(UNKNOWN in word for word in inner):
            return None
        if inner[:1] == ["!"]:
            found = self._test(inner[1:])
            return None if found is None else not found
        if inner[:1] in (["-z"], ["-n"]) and len(inner) <= 2:  # an empty word that was not quoted is none
            return ("".join(inner[1:]) == "") == (inner[0] == "-z")
        if len(inner) == 3 and inner[1] in ("=", "==", "!="):
            return (inner[0] == inner[2]) == (inner[1] != "!=")
        if len(inner) == 3 and inner[1] in NUMBERS and all(re.fullmatch(r"-?\d+", n) for n in (inner[0], inner[2])):
            return NUMBERS[inner[1]](int(inner[0]), int(inner[2]))
        return None

    def _case(self, command: list[Token]) -> None:
        word = "".join(self.words(command[1], split=False))
        for patterns, body in _cases(command):
            if UNKNOWN in word:
                self._forget(command, f"case {command[1].text}")
                return
            if any(fnmatch.fnmatchcase(word, "".join(self.words(pattern, split=False))) for pattern in patterns):
                self.run(body)
                return

    def _forget(self, code: list[Token], cause: str = "") -> None:
        """Mark what `code` assigns as unknown: it may run, or not. cause: what decides that."""
        for token in code:
            if token.name:
                self._set(token, [f"{UNKNOWN}{cause or code[0].text}{UNKNOWN}"])

    def words(self, token: Token, *, split: bool = True) -> list[str]:
        """Return the words that a token becomes. split: text outside of quotes is divided at blanks."""
        found, open_word = [""], False
        for text, quote in token.parts:
            whole = re.fullmatch(r"\$(?:\{(\w+)\[[@*]\]\}|([@*]))", text) if quote != "'" else None
            if whole:
                items = self.arguments if whole[2] else self._value(whole[1])
                found[-1:] = [found[-1] + items[0], *items[1:]] if items else found[-1:]
                open_word = open_word or bool(items)
                continue
            expanded = text if quote == "'" else self._expanded(text)
            if quote or not split or expanded == text:
                found[-1] += expanded
                open_word = open_word or bool(quote) or bool(expanded)
                continue
            for piece in re.findall(rf"\s+|(?:[^\s{UNKNOWN}]|{UNKNOWN}[^{UNKNOWN}]*{UNKNOWN})+", expanded):
                if piece.isspace():
                    found.append("")
                else:
                    found[-1] += piece
            open_word = open_word or bool(expanded)
        return found if open_word else []

    def _value(self, name: str) -> list[str]:
        if name in self.values:
            return self.values[name]
        return [self.environment[name]] if name in self.environment else []

    def _expanded(self, text: str) -> str:
        """Return the text with its variables, arithmetic and defaults filled in."""
        result, place = "", 0
        while place < len(text):
            if text[place] != "$":
                result, place = result + text[place], place + 1
                continue
            end = _expansion_end(text, place)
            result, place = result + self._expansion(text[place:end]), end
        return result

    def _expansion(self, text: str) -> str:
        if text.startswith("$((") and text.endswith("))"):
            return self._arithmetic(text[3:-2])
        if text.startswith("$("):
            output = None
            with suppress(ConfigError, RecursionError):
                output = self._output(list(tokens(text[2:-1])))
            return f"{UNKNOWN}{text}{UNKNOWN}" if output is None else output
        found = re.fullmatch(r"\$(?:(\w+)|\{(\w+)(?:\[0\])?(?:(:?[-=+?])(.*))?\})", text, re.DOTALL)
        if not found:
            return text if text == "$" else f"{UNKNOWN}{text}{UNKNOWN}"
        name, operator, other = found[1] or found[2], found[3] or "", found[4] or ""
        value = "".join(self._value(name)[:1])
        is_set = bool(value) if operator.startswith(":") else bool(self._value(name))
        if operator[-1:] in ("-", "="):
            return value if is_set else self._expanded(_unquoted(other))
        if operator[-1:] == "+":
            return self._expanded(_unquoted(other)) if is_set else ""
        if operator[-1:] == "?" and not is_set:
            return f"{UNKNOWN}{name}{UNKNOWN}"
        return value

    def _output(self, code: list[Token]) -> str | None:
        """Return what the commands of a `$(...)` print; None if one of them would have to be run."""
        status, folder = True, "".join(self._value("PWD"))
        lines: list[str] = []
        for link, command in _linked_commands(code):
            if link == ";" or status == (link == "&&"):
                words = [word for token in _without_redirections(command) for word in self.words(token)]
                known = None if any(map(unresolved, words)) else _printed(words, folder)
                if known is None or any(token.text == "|" for token in code):
                    return None
                status, folder, line = known
                if line is not None and any(token.is_redirection for token in command):
                    return None
                lines += [] if line is None else [line]
        return "\n".join(lines)

    def _arithmetic(self, text: str) -> str:
        names = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda found: " ".join(self._value(found[1])) or "0", text)
        try:
            return str(_integer(ast.parse(names.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return f"{UNKNOWN}$(({text})){UNKNOWN}"


def _printed(words: list[str], folder: str) -> tuple[bool, str, str | None] | None:
    """Return status, directory and output of a known command, None of others.

    Known are some commands that change nothing outside of their shell.
    """
    match words:
        case ["echo", text] if not text.startswith("-"):
            return True, folder, text
        case ["pwd"]:
            return True, folder, folder
        case ["cd", path] | ["cd", "--", path] if path != "-":
            return True, os.path.normpath(os.path.join(folder, path)), None
        case ["dirname", path] if not path.endswith("/"):
            return True, folder, os.path.dirname(path) or "."
        case ["date", layout] if re.fullmatch(r"\+(?:[^%]|%[YymdHMSjsFT])*", layout):
            return True, folder, time.strftime(layout[1:])
        case ["python" | "python3", "-c", code] if found := re.fullmatch(r"import (\w+)", code):
            return PathFinder.find_spec(found[1]) is not None, folder, None
    return None


def _integer(node: ast.AST) -> int:
    """Return the value of an expression of whole numbers, as bash calculates it.

    Raises:
        ValueError: It has something else than whole numbers, + - * / % and brackets.
        ZeroDivisionError: It divides by 0.
    """
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            return -_integer(operand) if isinstance(sign, ast.USub) else _integer(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in ARITHMETIC:
            return ARITHMETIC[type(sign)](_integer(left), _integer(right))
    raise ValueError(f"no arithmetic of whole numbers: {ast.dump(node)}")


def _quotient(a: int, b: int) -> int:
    """Return a / b without its fraction: bash rounds towards 0."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: int.__add__,
    ast.Sub: int.__sub__,
    ast.Mult: int.__mul__,
    ast.Div: _quotient,
    ast.Mod: lambda a, b: a - b * _quotient(a, b),
}


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _expansion_end(text: str, start: int) -> int:
    """Return the place behind the expansion that begins at `start`."""
    if text[start + 1 : start + 2] in ("{", "("):
        return bracket_end(text, start + 1)
    found = re.match(r"\$(\w+|[@*#?])?", text[start:])
    return start + (found.end() if found else 1)


def _linked_commands(code: list[Token]) -> Iterator[tuple[str, list[Token]]]:
    """Yield each command with what links it to the one before: `&&`, `||`, or ; for all else."""
    place, link = 0, ";"
    while place < len(code):
        end = _command_end(code, place)
        if command := list(itertools.dropwhile(lambda token: token.text == "\n", code[place:end])):
            yield link, command
        link = code[end].text if end < len(code) and code[end].text in ("&&", "||") else ";"
        place = end + 1


def _command_end(code: list[Token], start: int) -> int:
    """Return the place of the separator behind the command at `start`, past what it encloses."""
    ends: list[str] = []
    at_start = True
    for place in range(start, len(code)):
        token = code[place]
        if at_start and token.plain in END_WORDS:
            ends.append(END_WORDS[token.plain])
        elif ends and at_start and token.plain == ends[-1]:
            ends.pop()
        elif not ends and token.is_separator:
            return place
        at_start = token.is_separator or token.plain in ("then", "else", "do", "{", "!") or token.text == ")"
    if ends:
        raise ConfigError(f"{code[start].text}: there is no {ends[-1]} for it")
    return len(code)


def _branches(command: list[Token]) -> Iterator[tuple[list[Token] | None, list[Token]]]:
    """Yield condition and body of each branch of an `if`; the condition of `else` is None."""
    places = [place for place in _top_level(command) if command[place].plain in ("if", "elif", "else", "then", "fi")]
    for here, there, after in zip(places, places[1:], [*places[2:], len(command)], strict=False):
        if command[here].plain in ("if", "elif"):
            yield command[here + 1 : there], command[there + 1 : after]
        elif command[here].plain == "else":
            yield None, command[here + 1 : there]


def _top_level(command: list[Token]) -> Iterator[int]:
    """Yield the places of a compound command that no inner one encloses."""
    place = 0
    while place < len(command):
        nested = place > 0 and command[place].plain in END_WORDS and command[place - 1].text != "("
        if not nested:
            yield place
        place = _command_end(command, place) if nested else place + 1


def _cases(command: list[Token]) -> Iterator[tuple[list[Token], list[Token]]]:
    """Yield the patterns and the body of each branch of a `case`."""
    place = next(place for place, token in enumerate(command) if token.plain == "in") + 1
    while place < len(command) - 1:
        closing = next((n for n in range(place, len(command)) if command[n].text == ")"), None)
        if closing is None:
            return
        patterns = [token for token in command[place:closing] if token.parts]
        end = closing + 1
        while end < len(command) - 1 and command[end].text != ";;":
            nested = command[end].plain in END_WORDS
            end = _command_end(command, end) if nested else end + 1
        yield patterns, command[closing + 1 : end]
        place = end + 1


def _without_redirections(words: list[Token]) -> Iterator[Token]:
    """Yield the words of a command without `> file` and `2>&1`."""
    after_sign = False
    for word, following in itertools.zip_longest(words, words[1:]):
        is_stream = following is not None and following.is_redirection and word.text.isdigit()
        if not (after_sign or word.is_redirection or is_stream):
            yield word
        after_sign = word.is_redirection
