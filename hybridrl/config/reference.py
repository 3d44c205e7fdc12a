"""The settings as text: what `--help` prints and what stands in docs/config.md. Renders, writes nothing.

`python -m hybridrl.config.reference > docs/config.md`: writes the reference of all settings to standard output.
"""

import sys
from collections.abc import Iterator, Mapping
from textwrap import indent

from hybridrl.config.introspection import Key, Section, sections
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.config.schema.sft import SFTConfig
from hybridrl.errors import ConfigError

USAGE = """\
usage: {program} [key=value ...] [--config-name NAME] [--config-path DIR] [--cfg job] [--help [WORD]]

  key=value            set a key; the value is YAML: 8, 1e-6, true, null, [a,b], {{name:value}}
  +key.name=value      add a name of your own, in a mapping only
  ~key                 go back from a preset's value to the default
  --config-name NAME   start from this preset, or from NAME.yaml in your own directory
  --config-path DIR    your directory of YAML files; `defaults: [{base}, _self_]` makes one stand on a preset
  --cfg job            print the configuration that would run, and stop
  --help WORD          only the keys with this word in their name

examples:
  {program} data.train_files=train.parquet trainer.total_epochs=3
  {program} trainer.experiment_name='${{trainer.project_name}}-${{oc.env:USER}}'
  {program} --config-path conf --config-name my_run trainer.total_training_steps=100
  {program} --help optim

presets:
{presets}
"""
MARKDOWN_HEAD = """\
# Settings

Generated from the schema by `python -m hybridrl.config.reference > docs/config.md`.
A key is set on the command line as `key=value`, or in a YAML file.
"per_gpu" means per worker process, whatever its device.
"""


def help_text(schema: type, *, program: str, presets: Mapping[str, str], base: str, wanted: str = "") -> str:
    """Return usage, examples and every key with type, default, range and sentence; only keys that contain `wanted`, if
    given.

    `presets` are names with a sentence each; `base` is the one this program starts from.

    Raises ConfigError when no key contains `wanted`.
    """
    wanted = wanted.partition("=")[0]
    blocks = [_terminal_section(section, keys) for section, keys in _matching(schema, wanted)]
    if wanted and not blocks:
        raise ConfigError(f"--help {wanted}: no key has this in its name; --help alone lists all")
    if wanted:
        return "\n".join(blocks)
    width = max(map(len, presets))
    listed = "\n".join(f"  {name:<{width}}  {title}" for name, title in presets.items())
    return "\n".join([USAGE.format(program=program, base=base, presets=listed), *blocks])


def markdown(programs: Mapping[str, type]) -> str:
    """Return a page with one chapter per program and one table per section of its schema."""
    return "\n".join([MARKDOWN_HEAD, *(line for name, schema in programs.items() for line in _chapter(name, schema))])


def _matching(schema: type, wanted: str) -> Iterator[tuple[Section, list[Key]]]:
    for section in sections(schema):
        keys = [key for key in section.keys if wanted.lower() in key.name.lower()]
        if keys:
            yield section, keys


def _terminal_section(section: Section, keys: list[Key]) -> str:
    head = f"{section.name}: {section.help}" if section.name else "at the top:"
    return "\n".join([head, *(_terminal_key(key) for key in keys), ""])


def _terminal_key(key: Key) -> str:
    allowed = f", {key.range_text}" if key.range_text else ""
    return indent(f"{key.name}={key.default_text}\n    {key.help} ({key.type_name}{allowed})", "  ")


def _chapter(name: str, schema: type) -> Iterator[str]:
    yield f"## {name}\n"
    for section, keys in _matching(schema, ""):
        if section.name:
            yield f"### {section.name}\n\n{section.help}\n"
        yield "| key | type | default | allowed | meaning |\n|---|---|---|---|---|"
        yield from (
            f"| `{key.name}` | {key.type_name} | `{key.default_text}` | {key.range_text} | {key.help} |" for key in keys
        )
        yield ""


PROGRAMS = {"hybridrl.main_ppo": PPOConfig, "hybridrl.main_sft": SFTConfig}


def main() -> None:
    """Write the page; docs/config.md is this output, and a test compares the two."""
    sys.stdout.write(markdown(PROGRAMS))


if __name__ == "__main__":
    main()
