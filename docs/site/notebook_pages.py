"""Notebooks as Markdown pages."""

import json
from pathlib import Path


def as_markdown(path: Path) -> str:
    """Return the cells of a notebook, and the outputs that are stored in it, as a page of the site."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in parts_of(cell)) + "\n"


def parts_of(cell: dict) -> list[str]:
    """Return a cell's text or code, then its outputs."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    return [f"```python\n{source}\n```", *(shown(output) for output in cell.get("outputs", []))]


def shown(output: dict) -> str:
    """Return one output: a picture, or text."""
    data = output.get("data", {})
    if "image/png" in data:
        return f"![output of the cell above](data:image/png;base64,{''.join(data['image/png']).strip()})"
    text = "".join(output.get("text", data.get("text/plain", []))).rstrip()
    return f"```{{.text .output}}\n{text}\n```" if text else ""
