"""Load a config from a command line: presets, overrides, `--help` and `--cfg job`.

The programs `main_ppo`, `main_sft`, `main_dpo` and `main_rm` and the `hybridrl` command call `load_config`. It reads
the flags and the overrides, lets Hydra compose the YAML, and fills the schema. Hydra composes; the schema decides what
is valid. Hydra is imported inside functions, so that worker processes, which need only the schema, do not load it.
"""

import argparse
import contextlib
import functools
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from hybridrl import __version__
from hybridrl import config as settings
from hybridrl.config.build import InvalidValue, build, override_problem, parse_override, raise_problems
from hybridrl.config.introspection import to_dict, to_yaml
from hybridrl.errors import ConfigError

logger = logging.getLogger(__name__)
Schema = TypeVar("Schema")
PRESETS = Path(__file__).parent / "presets"
DEFAULTS_NODE = "schema_defaults"  # entry of a preset's `defaults` list that loads the schema's defaults
HYDRA_VERSION = "1.3"
HYDRA_KEY_REASON = (
    "Hydra only composes the configuration and does not run the program; outputs go to trainer.default_local_dir"
)
SYNTAX_HINT = "write no blanks around =, $HOME instead of ~, and quote special characters: 'key=\"value\"'"
SWEEP_REASON = (
    "one command is one run, there are no sweeps; write a list as [a,b], quote a value with a comma, "
    "or loop in the shell"
)


def load_config(schema: type[Schema], argv: Sequence[str] | None, *, program: str, config_name: str) -> Schema | None:
    """Return the frozen config described by `argv`; None after `--help`, `--version` and `--cfg job`.

    Rules over several settings are checked by `check_config`, not here. A GGUF file as a model is replaced by the
    folder of its conversion (`gguf_models`).

    Args:
        schema: Schema of the program.
        argv: The arguments, without the program's name. None: those of the command line.
        program: The program as the user typed it (`python -m hybridrl.main_ppo`).
        config_name: Preset used without `--config-name`.

    Raises:
        ConfigError: One line for every unknown key, wrong type and value out of range.
    """
    flags, words = _read_flags(sys.argv[1:] if argv is None else argv)
    if flags.version:
        sys.stdout.write(f"hybridrl {__version__}\n")
        return None
    if flags.help is not None:
        sys.stdout.write(
            settings.help_text(
                schema, program=program, presets=preset_titles(config_name), base=config_name, wanted=flags.help
            )
        )
        return None
    words, folder = _without_verl_preset(flags, words)
    name = flags.config_name or config_name
    _check_preset(name, folder=folder, base=config_name, program=program)
    config, problems = _compose_and_build(schema, words, name=name, folder=folder)
    if problems:  # perhaps the command line is one of verl
        taken = settings.take_over(schema, words)
        config, problems = _compose_and_build(schema, taken.words, name=name, folder=folder)
        raise_problems(taken.refusals + problems)
        taken.log()
    if flags.cfg:
        sys.stdout.write(to_yaml(config))
        return None
    return _with_model_folders(config)


def compose_settings(schema: type[Schema], settings: Mapping[str, Any], *, config_name: str) -> Schema:
    """Return the frozen config of a preset with these settings changed: `load_config` for a Python program.

    Args:
        schema: Schema of the program.
        settings: Values by dotted key.
        config_name: Preset.

    Raises:
        ConfigError: One line for every unknown key, wrong type and value out of range.
    """
    from omegaconf import OmegaConf

    problems = [problem for key in settings if (problem := override_problem(schema, key))]
    chosen = OmegaConf.create(_composed_preset(cast(type, schema), config_name))
    for key, value in settings.items():
        OmegaConf.update(chosen, key, value, merge=True, force_add=True)
    config, more = build(schema, _resolved(chosen))
    raise_problems(problems + more)
    return _with_model_folders(config)


def _with_model_folders(config: Schema) -> Schema:
    return settings.with_model_folders(config) if ".gguf" in repr(config) else config


def _compose_and_build(
    schema: type[Schema], words: Sequence[str], *, name: str, folder: Path
) -> tuple[Schema, list[str]]:
    """Return the config of these overrides, and a line for each invalid one."""
    overrides, problems = _read_overrides(schema, words, folder=folder)
    config, more = build(schema, _compose(schema, overrides, name=name, folder=folder))
    return config, problems + more


def _without_verl_preset(flags: argparse.Namespace, words: list[str]) -> tuple[list[str], Path]:
    """Return words and directory; a configuration of verl's that the flags name becomes settings."""
    name = (flags.config_name or "").removesuffix(".yaml")
    if (PRESETS / f"{name}.yaml").is_file() and flags.config_path is None:
        return words, PRESETS
    instead = settings.preset_words(flags.config_name, flags.config_path) if flags.config_name else None
    if instead is None:
        return words, _config_directory(flags.config_path)
    logger.info("--config-name %s is verl's configuration; here that is %s", name, " ".join(instead) or "the default")
    flags.config_name = flags.config_path = None
    return [*instead, *words], PRESETS


def preset_titles(base: str) -> dict[str, str]:
    """Return the presets of a program, each with the first line of its file.

    Args:
        base: The program's base preset.
    """
    titles = {path.stem: path.read_text().splitlines()[0].lstrip("# ") for path in sorted(PRESETS.glob("*.yaml"))}
    program = titles[base].partition(":")[0]
    return {name: title for name, title in titles.items() if title.partition(":")[0] == program}


def _check_preset(name: str, *, folder: Path, base: str, program: str) -> None:
    """Refuse a preset of another program, whose settings do not exist in this one."""
    name, mine = name.removesuffix(".yaml"), preset_titles(base)
    if (
        (PRESETS / f"{name}.yaml").is_file()
        and name not in mine
        and (folder == PRESETS or not (folder / f"{name}.yaml").is_file())
    ):
        raise ConfigError(
            f"--config-name {name}: is a preset of another program; presets of {program}: {', '.join(mine)}"
        )


def _read_flags(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--help", "-h", nargs="?", const="")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-path", "-cp", "--config-dir", "-cd")
    try:
        flags, words = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}") from None
    raise_problems([_flag_problem(word) for word in words if word.startswith("-")])
    return flags, words


def _flag_problem(word: str) -> str:
    if word in ("-m", "--multirun"):
        return f"{word}: {SWEEP_REASON}"
    setting = word.lstrip("-")
    return f"{word}: there is no such flag; " + (
        f"write a setting without dashes: {setting}" if "=" in setting else "--help lists them"
    )


def _read_overrides(schema: type, words: Sequence[str], *, folder: Path) -> tuple[list[str], list[str]]:
    """Return the overrides in Hydra's syntax, and a line for each invalid one."""
    overrides, problems = [], []
    for word in words:
        try:
            overrides.append(_read_override(schema, word, folder=folder))
        except InvalidValue as refused:
            problems.append(str(refused))
    return overrides, problems


def _read_override(schema: type, word: str, *, folder: Path) -> str:
    override = parse_override(word)
    if override is None or not override.key_or_group:
        raise InvalidValue(f"{word}: cannot be read as key=value; {SYNTAX_HINT}")
    name = override.key_or_group
    if name.partition(".")[0] == "hydra":
        raise InvalidValue(f"{name}: {HYDRA_KEY_REASON}")
    if override.is_sweep_override():
        raise InvalidValue(f"{word}: {SWEEP_REASON}")
    if (folder / name).is_dir():  # a config group of the user: the value selects one of its YAML files
        return word
    problem = override_problem(schema, name)
    if problem:
        raise InvalidValue(problem)
    # `++` sets a key whether or not the chosen YAML has it; the schema decides whether it exists
    return word if word.startswith("~") else "++" + word.lstrip("+")


def _compose(schema: type, overrides: list[str], *, name: str, folder: Path) -> dict[str, Any]:
    """Return defaults, chosen YAML and overrides merged in this order, interpolations resolved."""
    from omegaconf.errors import OmegaConfBaseException

    name = name.removesuffix(".yaml")
    if folder == PRESETS and all(word.startswith("++") and "@" not in word.partition("=")[0] for word in overrides):
        try:
            return _resolved(_with_overrides(_composed_preset(schema, name), overrides))
        except OmegaConfBaseException:  # Hydra raises it again, with the override
            pass
    with _one_line_errors(name, folder):
        return _resolved(_compose_by_hydra(schema, overrides, name=name, folder=folder))


def _resolved(config: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=True, throw_on_missing=True))


@functools.cache
def _composed_preset(schema: type, name: str) -> dict[str, Any]:
    """Return a built-in preset over the defaults, interpolations unresolved; composing it takes most of the time."""
    from omegaconf import OmegaConf

    composed = OmegaConf.to_container(_compose_by_hydra(schema, [], name=name, folder=PRESETS))
    return cast(dict[str, Any], composed)


def _with_overrides(preset: dict[str, Any], overrides: list[str]) -> Any:
    """Return the preset with overrides `++key=value`, as Hydra applies them."""
    from omegaconf import OmegaConf

    config = OmegaConf.create(preset)
    for override in map(parse_override, overrides):
        OmegaConf.update(config, override.key_or_group, override.value(), merge=True, force_add=True)
    return config


def _compose_by_hydra(schema: type, overrides: list[str], *, name: str, folder: Path) -> Any:
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    home, other = _split_directories(name, folder)
    defaults = to_dict(schema())
    ConfigStore.instance().store(name=DEFAULTS_NODE, node=defaults)
    with initialize_config_dir(config_dir=str(home), version_base=HYDRA_VERSION):
        chosen = compose(name, overrides=[f'hydra.searchpath=["file://{other}"]', *overrides])
        return OmegaConf.merge(defaults, chosen)


@contextlib.contextmanager
def _one_line_errors(name: str, folder: Path) -> Iterator[None]:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except UnicodeDecodeError as error:
        home, _ = _split_directories(name, folder)
        raise ConfigError(f"configuration {name}: {home / name}.yaml is not text in UTF-8 ({error.reason})") from None
    except RecursionError:
        raise ConfigError(f"configuration {name}: it is nested too deeply to be one") from None
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"configuration {name}: {_one_line(error)}") from None


def _config_directory(folder: str | None) -> Path:
    if folder is None:
        return PRESETS
    if not Path(folder).is_dir():
        raise ConfigError(f"--config-path {folder}: there is no such directory (relative to {Path.cwd()})")
    return Path(folder).resolve()


def _split_directories(name: str, folder: Path) -> tuple[Path, Path]:
    """Return the directory of `name`.yaml, and the other one, for its `defaults`.

    The user's directory takes precedence over the presets.
    """
    for home, other in ((folder, PRESETS), (PRESETS, folder)):
        if (home / f"{name}.yaml").is_file():
            return home, other
    names = sorted({path.stem for base in (folder, PRESETS) for path in base.glob("*.yaml")})
    raise ConfigError(
        f"--config-name {name}: there is no such file; {settings.suggest_name(name, names)}; set --config-path to your "
        "directory"
    )


def _one_line(error: Exception) -> str:
    """Return an error of Hydra, OmegaConf or YAML as one line.

    Search paths and type names are left out.
    """
    lines = [line.strip() for line in str(error).partition("Config search path")[0].splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith(("object_type", "reference_type")))
