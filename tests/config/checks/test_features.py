"""The rules of a feature are loaded only if its settings are given: without them they have nothing to say."""

import math
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hybridrl.config import PPOConfig
from hybridrl.config.build import build
from hybridrl.config.checks.rules import FEATURES
from hybridrl.config.introspection import SettingSpec, changed, keys

NUM_CONFIGS = 60  # per feature


def other_values(key: SettingSpec) -> Iterator[object]:
    """Yield values of a setting that its own bounds allow."""
    if key.choices:
        yield from key.choices
    elif key.registry is not None:
        yield from key.registry.builtins
    elif key.type is bool:
        yield from (False, True)
    elif key.type in (int, float):
        least, most = (
            key.bounds.get("ge", key.bounds.get("gt", -3)),
            key.bounds.get("le", key.bounds.get("lt", math.inf)),
        )
        yield from (value for value in (least, 1, 2, 300) if key.bounds.get("gt", -math.inf) < value <= most)
    elif key.type is str:
        yield "other"
    if key.optional:
        yield None


def nested(values: dict[str, object]) -> dict:
    result: dict = {}
    for name, value in values.items():
        *above, last = name.split(".")
        section = result
        for part in above:
            section = section.setdefault(part, {})
        section[last] = value
    return result


@pytest.mark.parametrize("place", range(len(FEATURES)))
def test_without_its_settings_a_feature_has_no_problems_whatever_else_is_set(place):
    names, rule = FEATURES[place]
    own = tuple(f"{name}." for name in names)
    others = [key for key in keys(PPOConfig).values() if key.name not in names and not key.name.startswith(own)]
    choose = random.Random(place)
    for _ in range(NUM_CONFIGS):
        some = choose.sample(others, k=len(others) // 2)
        values = {key.name: choose.choice(found) for key in some if (found := list(other_values(key)))}
        config, _ = build(PPOConfig, nested(values))
        assert not changed(config, *names) and len(changed(config, *(key.name for key in others))) > 10
        assert list(rule(config)) == []


def test_a_plain_config_loads_no_rules_of_features():
    code = (
        "import sys; from tests.config.checks.test_rules import NAMES, ROLLOUTS; from hybridrl.config import *\n"
        "try: check_config(PPOConfig(), **NAMES, rollout=ROLLOUTS['hf'], transport=None)\n"
        "except ValueError: pass\n"
        "print(*sorted(name.rpartition('.')[2] for name in sys.modules if name.startswith('hybridrl.config.checks.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"adapters", "asynchrony", "distillation", "megatron", "rollout_correction", "sampling"}
    assert {"engines", "formulas", "rollout", "rules"} <= loaded
