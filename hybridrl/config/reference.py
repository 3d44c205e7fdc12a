"""Render the settings as text: for `--help`, and as the page docs/config.md.

`python -m hybridrl.config > docs/config.md` writes the page.
"""

from collections.abc import Iterator, Mapping
from textwrap import indent

from hybridrl.config.introspection import SettingSection, SettingSpec, sections, value_text
from hybridrl.config.schema.generation import EvaluationConfig, GenerationConfig
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.config.schema.preference import DPOConfig, RMConfig
from hybridrl.config.schema.sft import SFTConfig
from hybridrl.errors import ConfigError

USAGE = """\
usage: {program} [key=value ...] [--config-name NAME] [--config-path DIR] [--cfg job] [--help [WORD]] [--version]

  key=value            set a key; the value is YAML: 8, 1e-6, true, null, [a,b], {{name:value}}
  +key.name=value      add a name of your own, in a mapping only
  ~key                 undo a preset's value: use the default
  --config-name NAME   start from this preset, or from NAME.yaml in your own directory
  --config-path DIR    your directory of YAML files; `defaults: [{base}, _self_]` starts one from a preset
  --cfg job            print the resulting configuration and exit
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

Generated from the schema by `python -m hybridrl.config > docs/config.md`.
A key is set on the command line as `key=value`, or in a YAML file.
"per_gpu" means per worker process, whatever its device.
"""


def help_text(schema: type, *, program: str, presets: Mapping[str, str], base: str, wanted: str = "") -> str:
    """Return usage, examples and every setting with type, default, range and description.

    Args:
        schema: Schema of the program.
        program: The program as the user typed it.
        presets: Presets by name, with a sentence each.
        base: The program's base preset.
        wanted: If given, return only the settings with this word in their name.

    Raises:
        ConfigError: No key contains `wanted`.
    """
    wanted = wanted.partition("=")[0]
    blocks = [_terminal_section(section, keys) for section, keys in _matching(schema, wanted)]
    if wanted and not blocks:
        raise ConfigError(f"--help {wanted}: no key has this in its name; --help without a word lists all")
    if wanted:
        return "\n".join(blocks)
    width = max(map(len, presets))
    listed = "\n".join(f"  {name:<{width}}  {title}" for name, title in presets.items())
    return "\n".join([USAGE.format(program=program, base=base, presets=listed), *blocks])


def markdown(programs: Mapping[str, type]) -> str:
    """Return a page with one chapter per program and one table per section."""
    return "\n".join([MARKDOWN_HEAD, *(line for name, schema in programs.items() for line in _chapter(name, schema))])


def _matching(schema: type, wanted: str) -> Iterator[tuple[SettingSection, list[SettingSpec]]]:
    for section in sections(schema):
        keys = [key for key in section.keys if wanted.lower() in key.name.lower()]
        if keys:
            yield section, keys


def _terminal_section(section: SettingSection, keys: list[SettingSpec]) -> str:
    head = f"{section.name}: {section.help}" if section.name else "top level:"
    return "\n".join([head, *(_terminal_key(key) for key in keys), ""])


def _terminal_key(key: SettingSpec) -> str:
    allowed = f", {key.range_text}" if key.range_text else ""
    return indent(f"{key.name}={value_text(key.default)}\n    {key.help} ({key.type_name}{allowed})", "  ")


def _chapter(name: str, schema: type) -> Iterator[str]:
    yield f"## {name}\n"
    for section, keys in _matching(schema, ""):
        if section.name:
            yield f"### {section.name}\n\n{section.help}\n"
        yield "| key | type | default | allowed | meaning |\n|---|---|---|---|---|"
        yield from (
            f"| `{key.name}` | {key.type_name} | `{value_text(key.default)}` | {key.range_text} | {key.help} |"
            for key in keys
        )
        yield ""


PROGRAMS = {
    "hybridrl.main_ppo": PPOConfig,
    "hybridrl.main_sft": SFTConfig,
    "hybridrl.main_dpo": DPOConfig,
    "hybridrl.main_rm": RMConfig,
    "hybridrl.main_generation": GenerationConfig,
    "hybridrl.main_eval": EvaluationConfig,
}
