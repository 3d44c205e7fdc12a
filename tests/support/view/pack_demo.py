"""Pack recorded runs as the archive that `hybridrl view --demo` shows.

    python -m tests.support.view.pack_demo ARCHIVE RUN[:EVERY[:LAST]] ...

Numbers keep five digits, and of metrics every EVERY-th step up to LAST stays. Paths and names of the machine are left
out; the journal gets new checksums for that.
"""

import json
import re
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import yaml

KEPT = ("metrics.jsonl", "config.json", "ledger.jsonl", "failures.jsonl")
FOLDERS = ("rollouts/*.jsonl", "rollouts/tokens/*.jsonl", "validation/*.jsonl", "trace/*/*.jsonl")
MACHINE = {"machine": "", "node": "", "name": "", "stdout": "", "stderr": "", "spec": "", "plan": "", "path": ""}
WHEN = (2026, 1, 1, 0, 0, 0)  # of every entry, so that equal runs make equal archives


def rounded(value):
    if isinstance(value, float):
        return float(f"{value:.5g}") if abs(value) < 1e6 else value
    if isinstance(value, dict):
        return {name: rounded(entry) for name, entry in value.items()}
    return [rounded(entry) for entry in value] if isinstance(value, list) else value


def texts(run: Path, *, every: int, last: int) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the files of a run."""
    for path in [run / name for name in KEPT] + [path for pattern in FOLDERS for path in sorted(run.glob(pattern))]:
        if not path.exists():
            continue
        records = [json.loads(line) for line in path.read_text().splitlines()]
        if path.name == "metrics.jsonl":
            records = [one for one in records if one["step"] <= last and one["step"] % every in (0, 1)]
        elif path.name == "failures.jsonl":
            records = [one for one in records if one["step"] <= last]
        elif path.name == "ledger.jsonl" and every > 1:
            continue
        for one in records if path.name == "ledger.jsonl" else ():
            one |= {"from": None} if "begin" in one else {}
        yield str(path.relative_to(run)), "".join(json.dumps(rounded(one)) + "\n" for one in records)
    if not (run / "config.json").exists():
        newest = max(run.glob("global_step_*/config.yaml"), key=lambda path: path.stat().st_mtime)
        yield "config.json", json.dumps(yaml.safe_load(newest.read_text()))
    yield from journals(run, last=last)


def journals(run: Path, *, last: int) -> Iterator[tuple[str, str]]:
    for path in sorted(run.glob("master/*/events-*.jsonl")):
        lines = []
        for line in path.read_text().splitlines():
            event = json.loads(line.partition(" ")[2])
            if event.get("step", 0) > last:
                break
            text = json.dumps({name: MACHINE.get(name, value) for name, value in event.items()})
            lines.append(f"{zlib.crc32(text.encode()):08x} {text}\n")
        yield str(path.relative_to(run)), "".join(lines)
        if len(lines) < len(path.read_text().splitlines()):
            return


def main(archive: str, *runs: str) -> None:
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for word in runs:
            path, every, last = [*word.split(":"), "1", "1000000000"][:3]
            run = Path(path.rstrip("/"))
            name = run.name if run.name != "run" else run.parent.name
            for file, text in texts(run, every=int(every), last=int(last)):
                text = re.sub(r"/[\w./-]*?/(?=[\w.-]+\")", "", text) if file == "config.json" else text
                packed.writestr(zipfile.ZipInfo(f"{name}/{file}", WHEN), text, zipfile.ZIP_DEFLATED, 9)


if __name__ == "__main__":
    main(*sys.argv[1:])
