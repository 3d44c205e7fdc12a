"""Compare verl's defaults with ours, from the configurations in verl's installed package.

    python .ci/verl_defaults.py DIRECTORY_OF_THE_PACKAGE_verl

Prints every key that exists in both and has another default here, as `key | verl | here`. Those that decide results or
memory are in hybridrl/config/verl/defaults.py, which docs/coming_from.md shows.
"""

import sys
from pathlib import Path

from omegaconf import OmegaConf

from hybridrl.config import PPOConfig
from hybridrl.config.introspection import keys, value_text
from hybridrl.config.verl.row import text_of

FILE = "trainer/config/_generated_ppo_trainer.yaml"


def main() -> None:
    """Print the differences."""
    theirs = OmegaConf.load(Path(sys.argv[1]) / FILE)
    for key, spec in keys(PPOConfig).items():
        try:
            value = OmegaConf.select(theirs, key, default="absent", throw_on_missing=False)
        except Exception as error:
            value = f"({type(error).__name__})"
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=False)
        if value != "absent" and text_of(value) != text_of(spec.default):
            print(f"{key} | {value_text(value)} | {value_text(spec.default)}")


main()
