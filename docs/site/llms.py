"""llms.txt: what hybridrl is, and each page with its first sentence, for programs that read the documentation.

    python docs/site/llms.py > llms.txt

The format is that of llmstxt.org. Sections and order are those of `nav` in mkdocs.yml; `tests/test_docs_site.py` fails
when the file at the root is out of date.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
SENTENCE_CHARACTERS = 240
HEAD = """# hybridrl

> Reinforcement-learning post-training of language models: one readable driver program over groups of worker processes.
> PPO, GRPO and relatives, DPO and relatives, distillation and supervised fine-tuning; FSDP2 and Megatron-core; vLLM.

Settings are verl's `key=value` words. `python -m hybridrl.main_ppo --help WORD` prints type, range and meaning of each.
Everything runs on a CPU. Coding agents that work on the repository itself start with AGENTS.md.
"""


def text(prefix: str = "docs/") -> str:
    """Return the file; `prefix` is the path from it to the pages."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    sections = [(name, list(pages(entries))) for section in nav for name, entries in section.items()]
    parts = [HEAD]
    for name, paths in sections:
        lines = [line for path in paths if (line := entry(path, prefix))]
        parts.append(f"## {name}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def pages(entries: list) -> Iterator[str]:
    """Yield the paths in a part of `nav`, in its order."""
    for one in entries:
        if isinstance(one, str):
            yield one
        else:
            for inner in one.values():
                yield from pages(inner) if isinstance(inner, list) else (inner,)


def entry(path: str, prefix: str) -> str:
    """Return the line of a page; nothing for the reference, which is made of docstrings."""
    file = ROOT / "docs" / path
    if not file.exists():
        return ""
    source = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        source = "\n\n".join(
            "".join(cell["source"]) for cell in json.loads(source)["cells"] if cell["cell_type"] == "markdown"
        )
    title = re.sub("`", "", re.findall(r"^# (.*)$", source, re.MULTILINE)[0])
    return f"- [{title}]({prefix}{path}): {first_sentence(source)}"


def first_sentence(source: str) -> str:
    """Return the first sentence of a page's first paragraph, without links."""
    source = re.sub(r"```.*?```", "", source, flags=re.DOTALL)
    paragraphs = [
        part for part in source.split("\n\n") if part.strip() and not part.lstrip().startswith(("#", "|", "!"))
    ]
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraphs[0].split()))
    sentence = re.split(r"(?<=[.?])\s+(?=[A-Z`])", plain)[0].rstrip(":")
    return (
        sentence if len(sentence) <= SENTENCE_CHARACTERS else sentence[:SENTENCE_CHARACTERS].rsplit(" ", 1)[0] + " ..."
    )


if __name__ == "__main__":
    sys.stdout.write(text())
