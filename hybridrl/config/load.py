"""The command line in front of a schema: presets, overrides, `--help` and `--cfg job`.

Hydra reads and composes; the schema decides. `load_config` goes down one ladder: flags, overrides, composed YAML,
checked config. Hydra is imported where it is used, so that worker processes, which need the schema only, do not load
it.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from hybridrl.config.build import Refused, build, override_problem, raise_for
from hybridrl.config.introspection import to_dict, to_yaml
from hybridrl.config.reference import help_text
from hybridrl.config.unknown_keys import unknown_name
from hybridrl.errors import ConfigError

Schema = TypeVar("Schema")
PRESETS = Path(__file__).parent / "presets"
DEFAULTS_NODE = "schema_defaults"  # what a preset names in its `defaults` list to stand on the schema
HYDRA_VERSION = "1.3"
WHY_NO_HYDRA_KEYS = (
    "Hydra only reads the configuration here, it does not run the program; outputs go to trainer.default_local_dir"
)
HOW_TO_WRITE = "no blanks around =, $HOME instead of ~, special characters quoted: 'key=\"value\"'"
WHY_NO_SWEEP = "one command is one run; write a list as [a,b], quote a value with a comma, or loop in the shell"


def load_config(schema: type[Schema], argv: Sequence[str], *, program: str, config_name: str) -> Schema | None:
    """Return the frozen config that `argv` (without the program's name) describes; None after `--help` and `--cfg job`.

    `program` is what the user typed (`python -m hybridrl.main_ppo`), `config_name` the preset used without
    `--config-name`. Raises ConfigError with one line for every unknown key, wrong type and value out of range. What
    settings mean together is checked by `check_config`.
    """
    flags, words = _read_flags(argv)
    if flags.help is not None:
        sys.stdout.write(
            help_text(schema, program=program, presets=preset_titles(config_name), base=config_name, wanted=flags.help)
        )
        return None
    folder = _folder(flags.config_path)
    _check_preset(flags.config_name or config_name, folder=folder, base=config_name, program=program)
    overrides, problems = _read_overrides(schema, words, folder=folder)
    nested = _compose(schema, overrides, name=flags.config_name or config_name, folder=folder)
    config, more = build(schema, nested)
    raise_for(problems + more)
    if flags.cfg:
        sys.stdout.write(to_yaml(config))
        return None
    return config


def preset_titles(base: str) -> dict[str, str]:
    """Return the presets of the program that starts from `base`, each with the first line of its file, which says what
    it is for.
    """
    titles = {path.stem: path.read_text().splitlines()[0].lstrip("# ") for path in sorted(PRESETS.glob("*.yaml"))}
    program = titles[base].partition(":")[0]
    return {name: title for name, title in titles.items() if title.partition(":")[0] == program}


def _check_preset(name: str, *, folder: Path, base: str, program: str) -> None:
    """Refuse another program's preset: it has no setting that this one would notice."""
    name, mine = name.removesuffix(".yaml"), preset_titles(base)
    if (
        (PRESETS / f"{name}.yaml").is_file()
        and name not in mine
        and (folder == PRESETS or not (folder / f"{name}.yaml").is_file())
    ):
        raise ConfigError(f"--config-name {name}: is a preset of another program; {program} has {', '.join(mine)}")


def _read_flags(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--help", "-h", nargs="?", const="")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-path", "-cp", "--config-dir", "-cd")
    try:
        flags, words = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}") from None
    raise_for([_flag_problem(word) for word in words if word.startswith("-")])
    return flags, words


def _flag_problem(word: str) -> str:
    if word in ("-m", "--multirun"):
        return f"{word}: {WHY_NO_SWEEP}"
    setting = word.lstrip("-")
    return f"{word}: there is no such flag; " + (
        f"write a setting without dashes: {setting}" if "=" in setting else "--help lists them"
    )


def _read_overrides(schema: type, words: Sequence[str], *, folder: Path) -> tuple[list[str], list[str]]:
    """Return the overrides as Hydra takes them, and what is wrong with the others."""
    overrides, problems = [], []
    for word in words:
        try:
            overrides.append(_read_override(schema, word, folder=folder))
        except Refused as refused:
            problems.append(str(refused))
    return overrides, problems


def _read_override(schema: type, word: str, *, folder: Path) -> str:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    try:
        (override,) = OverridesParser.create().parse_overrides([word])
    except OverrideParseException:
        override = None
    name = override and override.key_or_group
    if not name:
        raise Refused(f"{word}: cannot be read as key=value; {HOW_TO_WRITE}")
    if name.partition(".")[0] == "hydra":
        raise Refused(f"{name}: {WHY_NO_HYDRA_KEYS}")
    if override.is_sweep_override():
        raise Refused(f"{word}: {WHY_NO_SWEEP}")
    if (folder / name).is_dir():  # the user's own group of YAML files: the value chooses one of them
        return word
    problem = override_problem(schema, name)
    if problem:
        raise Refused(problem)
    # `++` sets a key whether the chosen YAML has it or not: whether it exists is the schema's business
    return word if word.startswith("~") else "++" + word.lstrip("+")


def _compose(schema: type, overrides: list[str], *, name: str, folder: Path) -> dict[str, Any]:
    """Return the schema's defaults under the chosen YAML under the overrides, interpolations resolved."""
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    name = name.removesuffix(".yaml")
    home, other = _home_and_other(name, folder)
    defaults = to_dict(schema())
    ConfigStore.instance().store(name=DEFAULTS_NODE, node=defaults)
    try:
        with initialize_config_dir(config_dir=str(home), version_base=HYDRA_VERSION):
            chosen = compose(name, overrides=[f'hydra.searchpath=["file://{other}"]', *overrides])
        return OmegaConf.to_container(OmegaConf.merge(defaults, chosen), resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"configuration {name}: {_one_line(error)}") from None


def _folder(folder: str | None) -> Path:
    if folder is None:
        return PRESETS
    if not Path(folder).is_dir():
        raise ConfigError(f"--config-path {folder}: there is no such directory (it is looked up from {Path.cwd()})")
    return Path(folder).resolve()


def _home_and_other(name: str, folder: Path) -> tuple[Path, Path]:
    """Return the directory that holds `name`.yaml, the user's before ours, and the other one to look up its `defaults`
    in.
    """
    for home, other in ((folder, PRESETS), (PRESETS, folder)):
        if (home / f"{name}.yaml").is_file():
            return home, other
    names = sorted({path.stem for base in (folder, PRESETS) for path in base.glob("*.yaml")})
    raise ConfigError(
        f"--config-name {name}: there is no such file; {unknown_name(name, names)}; --config-path names your directory"
    )


def _one_line(error: Exception) -> str:
    """Return an error of Hydra, OmegaConf or YAML on one line, without its search paths and type names."""
    lines = [line.strip() for line in str(error).partition("Config search path")[0].splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith(("object_type", "reference_type")))
