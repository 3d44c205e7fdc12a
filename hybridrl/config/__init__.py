"""Settings: the schema of each program, and loading and checking of a frozen config.

A config comes from a command line, a YAML file or a dictionary. It is loaded in the driver and sent to the workers.
"""

from hybridrl.config.build import from_dict
from hybridrl.config.checks.preference import check_dpo_config, check_rm_config
from hybridrl.config.checks.rules import check_config, check_sft_config
from hybridrl.config.introspection import to_dict, to_yaml
from hybridrl.config.load import load_config
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.config.schema.preference import DPOConfig, RMConfig
from hybridrl.config.schema.sft import SFTConfig, SupervisedConfig

__all__ = [
    "DPOConfig",
    "PPOConfig",
    "RMConfig",
    "SFTConfig",
    "SupervisedConfig",
    "check_config",
    "check_dpo_config",
    "check_rm_config",
    "check_sft_config",
    "from_dict",
    "load_config",
    "to_dict",
    "to_yaml",
]
