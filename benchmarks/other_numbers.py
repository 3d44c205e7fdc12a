"""Store what the formulas of verl, TRL and OpenRLHF return for small batches; `tests/algos` compares ours with it.

    python benchmarks/other_numbers.py --verl DIR --trl DIR --openrlhf DIR

Each DIR is an unpacked wheel (`_other_formulas.py`). Writes `tests/conformance/data/{verl,trl,openrlhf}_formulas.json`.
A case has our name and our settings of a formula, the samples (`tests/support/algos/samples.py`), and their results.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from _openrlhf_numbers import openrlhf_cases  # noqa: E402
from _trl_numbers import trl_cases  # noqa: E402
from _verl_numbers import verl_cases  # noqa: E402

SOURCES = {"verl": verl_cases, "trl": trl_cases, "openrlhf": openrlhf_cases}


def version(folder: Path) -> str:
    [info] = folder.glob("*.dist-info")
    return " ".join(info.name.removesuffix(".dist-info").split("-"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in SOURCES:
        parser.add_argument(f"--{name}", type=Path, help="folder of the unpacked wheel")
    folders = {name: folder for name, folder in vars(parser.parse_args()).items() if folder}
    for name, folder in folders.items():
        cases = list(SOURCES[name](folder))
        path = ROOT / "tests" / "conformance" / "data" / f"{name}_formulas.json"
        lines = ",\n".join(json.dumps(found, separators=(",", ":")) for found in cases)
        path.write_text(f'{{"origin":"{version(folder)} (PyPI wheel)","cases":[\n{lines}\n]}}\n')
        print(f"{len(cases)} cases of {version(folder)}: {path}")


if __name__ == "__main__":
    main()
