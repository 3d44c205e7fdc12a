"""`python -m hybridrl.config.help > docs/config.md`: writes the reference of all settings to standard output."""

import sys

from hybridrl.config.ppo import PPOConfig
from hybridrl.config.reference import markdown
from hybridrl.config.sft import SFTConfig

PROGRAMS = {"hybridrl.main_ppo": PPOConfig, "hybridrl.main_sft": SFTConfig}


def main() -> None:
    """Write the page; docs/config.md is this output, and a test compares the two."""
    sys.stdout.write(markdown(PROGRAMS))


if __name__ == "__main__":
    main()
