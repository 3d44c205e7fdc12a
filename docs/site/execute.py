"""Run notebooks, and store their outputs in them.

    python docs/site/execute.py                                      # all of docs/notebooks, in place
    python docs/site/execute.py docs/notebooks/1_first_run.ipynb     # one
    python docs/site/execute.py --into DIRECTORY                     # leave the notebooks as they are

`make notebooks` calls it. A cell that raises, or takes longer than ten minutes, ends the program with the cell's error.
"""

import argparse
import os
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "notebooks"
CELL_TIMEOUT_S, START_TIMEOUT_S = 600, 300
ENVIRONMENT = {"RAY_worker_niceness": "0", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
"""Ray starts its workers with nice 15: beside other programs on a busy machine they would hardly run."""


def execute(path: Path) -> nbformat.NotebookNode:
    """Return the notebook with the outputs of a new kernel, which runs in the notebook's directory."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        startup_timeout=START_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute(env=os.environ | ENVIRONMENT)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
        if cell.cell_type == "code":
            cell.outputs = tidy(cell.outputs)
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return notebook


def tidy(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Return the outputs with consecutive prints joined, and without directory and address of this machine."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and joined and joined[-1].output_type == "stream":
            joined[-1].text += output.text
        else:
            joined.append(output)
    for output in joined:
        for holder, key in ((output, "text"), (output.get("data", {}), "text/plain")):
            if key in holder:
                shown = holder[key].replace(f"{FOLDER}/", "").replace(f"{ROOT}/", "../../")
                shown = re.sub(r"[\w/.-]*/ipykernel_\d+/\d+\.py", "cell", shown)
                holder[key] = re.sub(r"\b(?!127\.0\.0\.1)\d+(?:\.\d+){3}\b", "HOST", shown)
    return joined


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(FOLDER.glob("*.ipynb")))
    parser.add_argument("--into", type=Path, help="write the executed notebooks to this directory")
    args = parser.parse_args(argv)
    for path in args.notebooks:
        print(f"== {path.name}", flush=True)
        nbformat.write(execute(path), args.into / path.name if args.into else path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
