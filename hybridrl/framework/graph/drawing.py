"""Draw a graph as SVG: boxes in a row, and what flows between them as horizontal lines below.

    to_svg(boxes, lines, title="a job", notes=("dot: writes;  arrow: reads",))

`stage_graph.py` and `role_graph.py` say what the boxes and lines are. Each line has a dot below its source and an arrow
below every target. No two lines cross, and every name is text.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# All lengths are in pixels.
MIN_SLOT, GAP, BOX_HEIGHT = 128, 12, 66  # a slot holds a box; long names widen all slots
CHARACTER, SMALL_CHARACTER = 8.4, 6.6  # width per character: name in bold; other text
ROW, TEXT_LINE, LABEL_WIDTH = 27, 12, 58  # height of a line, of a further line of its label; characters of a label
MARGIN, TITLE_HEIGHT, NOTE_HEIGHT = 22, 26, 18
BAND, GUIDE = "#f5f5f5", "#d0d4d8"
KINDS = {"data": ("#34495e", ""), "state": ("#b03a2e", "6 3"), "order": ("#7f8c8d", "1 3")}  # -> colour, dashes
UNREAD = "#9aa4ad"


@dataclass(frozen=True)
class Box:
    """A box of a picture.

    Attributes:
        lines: Under the name.
        heavy: Whether its frame is square and thick.
        shaded: Whether the ground below it is.
    """

    name: str
    lines: tuple[str, ...]
    colour: str
    heavy: bool = False
    shaded: bool = False


@dataclass(frozen=True)
class Line:
    """A line of a picture, from one box to others. kind: of `KINDS`."""

    source: str
    targets: tuple[str, ...]
    label: str
    kind: str = "data"


def to_svg(boxes: Sequence[Box], lines: Sequence[Line], *, title: str, notes: Sequence[str]) -> str:
    """Return the picture; `notes` are written below it."""
    slot = slot_width(boxes)
    x = {box.name: MARGIN + slot * (i + 0.5) for i, box in enumerate(boxes)}
    top, parts = MARGIN + TITLE_HEIGHT, [_text(MARGIN, MARGIN + 10, title, "bold 15px", "start")]
    y = top + BOX_HEIGHT + 14
    drawn = []
    for line in lines:
        label = textwrap.wrap(line.label, LABEL_WIDTH, break_long_words=False)
        y += ROW + TEXT_LINE * (len(label) - 1)
        drawn += _line(line, label, x, y, is_last=list(x).index(line.source) >= len(x) - 3)
    bottom = y + 16
    for box in boxes:
        if box.shaded:
            parts.append(_rectangle(x[box.name] - slot / 2, top - 8, slot, bottom - top + 8, fill=BAND))
        parts.append(_path(f"M{x[box.name]:g} {top + BOX_HEIGHT:g}V{bottom:g}", GUIDE))
    parts += [*drawn, *(part for box in boxes for part in _box(box, x[box.name], top, slot - GAP))]
    for note in notes:
        bottom += NOTE_HEIGHT
        parts.append(_text(MARGIN, bottom, note, "11px", "start"))
    width, height = 2 * MARGIN + slot * len(boxes), bottom + MARGIN
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width:g}" height="{height:g}" fill="white"/>', *parts, "</svg>"]) + "\n"


def slot_width(boxes: Sequence[Box]) -> float:
    """Return the width of a slot that fits every name in its box."""
    names = [CHARACTER * len(box.name) for box in boxes]
    lines = [SMALL_CHARACTER * len(line) for box in boxes for line in box.lines]
    return max([MIN_SLOT, *(GAP + 12 + width for width in names + lines)])


def _box(box: Box, x: float, top: float, width: float) -> list[str]:
    frame = 'stroke="black" stroke-width="2.5"' if box.heavy else 'stroke="black" stroke-width="0.9" rx="11"'
    texts = [_text(x, top + 21, box.name, "bold 13px")]
    texts += [_text(x, top + 41 + 15 * i, line, "11px") for i, line in enumerate(box.lines)]
    return [_rectangle(x - width / 2, top, width, BOX_HEIGHT, fill=box.colour, more=frame), *texts]


def _line(line: Line, label: Sequence[str], x: dict[str, float], y: float, *, is_last: bool) -> list[str]:
    """Draw a line, with its label above its start: to the left where it goes back, or where the picture would end."""
    colour, dashes = KINDS[line.kind] if line.targets else (UNREAD, "")
    start, ends = x[line.source], [x[target] for target in line.targets]
    parts = [f'<circle cx="{start:g}" cy="{y:g}" r="3" fill="{colour}"/>']
    if ends:
        reach = (min([start, *ends]), max([start, *ends]))
        parts.append(_path(f"M{reach[0]:g} {y:g}H{reach[1]:g}", colour, f' stroke-dasharray="{dashes}"'))
    for end in ends:
        side = 8 if end < start else -8
        parts.append(f'<path d="M{end:g} {y:g}l{side} -4v8z" fill="{colour}"/>')
    back = is_last or bool(ends) and max(ends) < start
    for i, text in enumerate(reversed(label)):
        left = start + (-7 if back else 7)
        parts.append(_text(left, y - 5 - TEXT_LINE * i, text, "11px", "end" if back else "start", colour))
    return parts


def _text(x: float, y: float, text: str, font: str, anchor: str = "middle", colour: str = "black") -> str:
    weight, _, size = font.rpartition(" ")
    style = f'font-size="{size}"' + (f' font-weight="{weight}"' if weight else "")
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}" {style}>{escape(text)}</text>'


def _rectangle(x: float, y: float, width: float, height: float, *, fill: str, more: str = "") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" {more}/>'


def _path(path: str, colour: str, more: str = "") -> str:
    return f'<path d="{path}" stroke="{colour}" stroke-width="1.3" fill="none"{more}/>'
