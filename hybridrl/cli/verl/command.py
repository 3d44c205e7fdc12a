"""`hybridrl import-verl`: verl's command lines and launch scripts as commands of ours, with every change explained.

No program of a script is run. The rows of `hybridrl/config/verl` decide what becomes of each key, as in `main_ppo`.
"""

import argparse
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from hybridrl import main_ppo
from hybridrl.cli.verl.launch_script import UNKNOWN, ScriptRun, run_script, unresolved
from hybridrl.config.load import load_config
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.config.verl.defaults import differing_defaults
from hybridrl.config.verl.row import RowKind
from hybridrl.config.verl.take_over import Change, preset_words, take_over
from hybridrl.driver.terminal import one_line, show
from hybridrl.errors import ConfigError

PROGRAMS = ("main_ppo", "main_ppo_sync", "main_dapo")  # last part of the modules whose settings are verl's PPO ones


@dataclass(frozen=True)
class ImportedCommand:
    """One command of verl, as settings of ours.

    Attributes:
        words: The settings.
        changes: What became of words that are not taken over as they are.
        problems: What has to be decided before the command can run, a line each.
        num_given: Number of settings of verl's command.
        defaults: Settings that verl's command leaves to a default which differs here; they are among `words`.
    """

    words: list[str]
    changes: list[Change]
    problems: list[str]
    num_given: int
    defaults: list[str]


def import_verl(arguments: argparse.Namespace) -> int:
    """Print commands of verl as ours; return 1 if one cannot run as it is."""
    code = 0
    run = verl_commands(arguments.verl, os.environ)
    for place, words in enumerate(run.commands):
        imported = imported_command(words, run.problems)
        show(("\n" if place else "") + "\n".join(map(one_line, _report(imported))) + "\n")
        code = code or int(bool(imported.problems))
    return code


def verl_commands(given: Sequence[str], environment: Mapping[str, str]) -> ScriptRun:
    """Return the arguments of each `main_ppo` of verl that is run, and bash's problems.

    Args:
        given: A script with its arguments, or a command line.
        environment: Variables that a script reads.

    Raises:
        ConfigError: There is no such command.
    """
    commands: list[list[str]] = [list(given)]
    problems: list[str] = []
    if os.path.isfile(given[0]):
        try:
            text = Path(given[0]).read_text()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{given[0]}: is not text in UTF-8 ({error.reason})") from None
        commands, problems = run_script(text, environment, path=given[0], arguments=list(given[1:]))
    elif len(given) == 1:
        try:
            commands = [shlex.split(given[0])]
        except ValueError as error:
            raise ConfigError(f"{given[0]!r}: is no command line ({error})") from None
    found = [arguments for command in commands if (arguments := _arguments_of_program(command))]
    if not found:
        others = [
            f"it runs {one_line(_shown(' '.join(command[:5])))}"
            for command in commands[:20]
            if os.path.isfile(given[0])
        ]
        raise ConfigError(
            f"{given[0]}: has no command of verl.trainer.main_ppo; give an existing bash script, or the command line"
            + "".join(f"\n  {line}" for line in dict.fromkeys([*problems, *others]))
        )
    return ScriptRun(found, problems)


def imported_command(arguments: Sequence[str], script_problems: Sequence[str] = ()) -> ImportedCommand:
    """Return the arguments of verl's `main_ppo` as settings of ours.

    Args:
        arguments: Words behind the program.
        script_problems: What bash could not do in the script, each in a line.
    """
    words = [word for word in arguments if not unresolved(word)]
    known = [word for word in words if one_line(word) == word]
    problems = [*script_problems]
    problems += [f"{word!r}: has a control character; write it in one line" for word in words if word not in known]
    problems += [
        f"{_shown(word)}: depends on {_cause(word)}, which is not run here; set a variable of the "
        "script in this shell, or write the value yourself"
        for word in set(arguments) - {*words}
    ]
    flags, words = _divided(known)
    problems += [f"{word}: is a flag of Hydra; leave it out" for word in words if word.startswith("-") and word != "--"]
    words = [word for word in words if not word.startswith("-")]
    preset = preset_words(flags.get("name"), flags.get("path", "verl's"))
    if flags and preset is None:
        problems.append(f"--config-name={flags.get('name')}: is a file of your own; give its settings as key=value")
    given = [*(preset or ()), *words]
    taken = take_over(PPOConfig, given)
    defaults = _defaults(taken.words)
    problems += [*taken.refusals, *_problems([*taken.words, *defaults])]
    return ImportedCommand([*taken.words, *defaults], taken.changes, sorted(problems), len(given), defaults)


def _arguments_of_program(command: Sequence[str]) -> list[str] | None:
    """Return what follows the program in a command, or None.

    A command of settings alone is returned whole.
    """
    for place, word in enumerate(command):
        if word.removesuffix(".py").replace("/", ".").rpartition(".")[2] in PROGRAMS:
            return list(command[place + 1 :])
    return list(command) if command and all("=" in word for word in command) else None


def _divided(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return Hydra's flags by `name` and `path`, and the settings."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-name", "-cn", dest="name")
    parser.add_argument("--config-path", "-cp", "--config-dir", "-cd", dest="path")
    flags, rest = parser.parse_known_args(list(words))
    return {key: value for key, value in vars(flags).items() if value is not None}, rest


def _defaults(words: Sequence[str]) -> list[str]:
    """Return verl's defaults that differ here and that no word sets."""
    given = {key.lstrip("+~"): value for key, _, value in (word.partition("=") for word in words)}
    missing = differing_defaults(given)
    if "actor_rollout_ref.actor.clip_ratio" in given:  # verl reads the two bounds only
        bounds = ("actor_rollout_ref.actor.clip_ratio_low", "actor_rollout_ref.actor.clip_ratio_high")
        missing |= {key: "0.2" for key in bounds if key not in given}
    return [f"{key}={value}" for key, value in missing.items()]


def _problems(words: Sequence[str]) -> list[str]:
    """Return what `main_ppo` would refuse, except for files, which may be elsewhere."""
    try:
        config = load_config(PPOConfig, words, program=main_ppo.PROGRAM, config_name=main_ppo.PRESET)
        assert config is not None  # there are no flags
        main_ppo.validate_config(config, with_inputs=False)
    except ConfigError as error:
        head, *lines = str(error).splitlines()
        return [line.strip() for line in lines] or [head]
    return []


def _report(imported: ImportedCommand) -> Iterator[str]:
    unchanged = imported.num_given - len(imported.changes)
    yield f"# {imported.num_given} settings of verl; {unchanged} are the same here."
    changes = sorted(imported.changes, key=lambda change: list(RowKind).index(change.kind))
    for kind, group in groupby(changes, key=lambda change: change.kind):
        if kind is not RowKind.REFUSED:
            found = list(group)
            yield f"# Those that {kind} ({len(found)}):"
            yield from (f"#   {change}" for change in found)
    if imported.defaults:
        yield "# Defaults of verl that differ here, added to the command:"
        yield from (f"#   {word}" for word in imported.defaults)
    sign = ""
    if imported.problems:
        yield f"# To be decided first ({len(imported.problems)}), therefore the command below is commented out:"
        yield from (f"#   {line}" for line in imported.problems)
        sign = "# "
    lines = [main_ppo.PROGRAM, *(f"    {shlex.quote(word)}" for word in imported.words)]
    yield from (f"{sign}{line}" + (" \\" if line is not lines[-1] else "") for line in lines)


def _shown(word: str) -> str:
    return re.sub(f"{UNKNOWN}[^{UNKNOWN}]*{UNKNOWN}", "?", word)


def _cause(word: str) -> str:
    return " and ".join(dict.fromkeys(unresolved(word)))
