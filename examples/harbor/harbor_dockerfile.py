"""What a task's `environment/Dockerfile` puts into a directory tree, for an environment without an image.

Read are FROM, WORKDIR, ENV, COPY and RUN. CMD, EXPOSE, LABEL, MAINTAINER and STOPSIGNAL change nothing for commands and
are left out. Everything else is refused: a task runs as it is written, or not at all.
"""

import json
import shlex
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

WITHOUT_EFFECT = frozenset({"CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL"})
REFUSED_FILES = ("docker-compose.yaml", ".dockerignore")


@dataclass(frozen=True)
class Step:
    """One COPY or RUN.

    Attributes:
        command: Of RUN.
        sources: Of COPY: files and directories of the task, by their absolute path in the tree.
        directory: Where the command starts.
        variables: That it sees.
    """

    command: str = ""
    sources: Mapping[str, Path] = field(default_factory=dict)
    directory: str = "/"
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Image:
    """A tree and how it is made.

    Attributes:
        workdir: Where commands start.
        variables: That they see.
        steps: In order.
    """

    workdir: str = "/app"
    variables: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def directories(self) -> set[str]:
        """Return the directories of the root that are written to."""
        paths = [self.workdir, *(step.directory for step in self.steps)]
        paths += [path for step in self.steps for path in step.sources]
        return {"/" + path.split("/")[1] for path in paths if path != "/"}


def read_image(folder: Path, *, workdir: str | None) -> Image:
    """Return what the Dockerfile of a task's `environment` directory makes.

    Args:
        folder: The directory.
        workdir: Of `task.toml`; None: that of the Dockerfile.

    Raises:
        ValueError: The file has an instruction that is not covered. Names it.
    """
    for name in REFUSED_FILES:
        if (folder / name).exists():
            raise ValueError(f"{folder / name}: is not covered by the environment `sandbox`; take docker")
    image, path = Image(), folder / "Dockerfile"
    for word, text in _instructions(path) if path.exists() else ():
        try:
            _add(image, word, text, folder)
        except ValueError as error:
            raise ValueError(f"{path}: {word} {text[:100]}: {error}; take the environment docker") from error
    image.workdir = workdir or image.workdir
    return image


def _instructions(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a Dockerfile: the word in capitals, and the rest."""
    pending = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("#") or not line.strip():
            continue
        pending += line.rstrip()
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
            continue
        word, _, text = pending.strip().partition(" ")
        pending = ""
        yield word.upper(), text.strip()


def _add(image: Image, word: str, text: str, folder: Path) -> None:
    """Add one instruction to an image. Raises ValueError with the reason if it is not covered."""
    is_start = not (image.variables or image.steps)
    if word == "FROM" and is_start and " as " not in text.lower():
        return
    if word == "WORKDIR":
        image.workdir = _in(image, text)
    elif word == "ENV":
        image.variables.update(_variables(text, image.variables))
    elif word == "RUN" and not text.startswith(("[", "--")) and "<<" not in text:
        image.steps.append(Step(text, directory=image.workdir, variables=dict(image.variables)))
    elif word == "COPY" and not text.startswith("--") and "<<" not in text:
        image.steps.append(Step(sources=_sources(image, text, folder)))
    elif word not in WITHOUT_EFFECT:
        raise ValueError("is not covered by the environment `sandbox`")


def _in(image: Image, path: str) -> str:
    """Return an absolute path; others begin at the working directory."""
    path = string.Template(path.strip("\"'")).substitute(image.variables) if "$" in path else path.strip("\"'")
    parts: list[str] = []
    for part in (PurePosixPath(image.workdir) / path).parts[1:]:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/" + "/".join(parts)


def _variables(text: str, known: Mapping[str, str]) -> dict[str, str]:
    words = shlex.split(text)
    if not words or "=" not in words[0]:
        raise ValueError("is no NAME=VALUE")
    pairs = dict(word.split("=", 1) for word in words)
    return {name: string.Template(value).safe_substitute(known) for name, value in pairs.items()}


def _sources(image: Image, text: str, folder: Path) -> dict[str, Path]:
    """Return what a COPY copies, by absolute path in the tree."""
    *patterns, target = json.loads(text) if text.startswith("[") else shlex.split(text)
    found = [
        path for pattern in patterns for path in sorted(folder.glob(pattern.lstrip("/").removeprefix("./") or "."))
    ]
    if not found:
        raise ValueError("copies nothing that is there")
    if any(not path.resolve().is_relative_to(folder.resolve()) for path in found):
        raise ValueError("copies files from elsewhere")
    into, sources = _in(image, target), {}
    for path in found:
        is_whole = path.is_dir() or (len(found) == 1 and not target.endswith("/") and target not in (".", ".."))
        sources[into if is_whole else f"{into.rstrip('/')}/{path.name}"] = path
    return sources
