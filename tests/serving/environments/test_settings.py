"""Files of environments: what is read, and what is refused with the place."""

import json
import re
import sys
from pathlib import Path

import pytest

from hybridrl.config.reward_limits import RewardLimits
from hybridrl.errors import ConfigError, DataError
from hybridrl.import_path import load_module
from hybridrl.serving.environments import environment
from hybridrl.serving.environments.settings import EnvironmentSpec, load_environments, spec_of_row

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"


def write(folder, *entries) -> str:
    (folder / "mine.py").write_text("class Maze:\n    pass\n")
    path = folder / "environments.json"
    path.write_text(json.dumps({"interaction": list(entries)}))
    return str(path)


def test_classes_are_named_by_file_by_module_in_verls_form_and_by_adapter(tmp_path):
    classes = {
        "a": ("mine.py:Maze", f"{tmp_path}/mine.py:Maze"),
        "b": ("package.module:Maze", "package.module:Maze"),
        "c": ("verl.interactions.gsm8k_interaction.Gsm8kInteraction",) * 2,
        "d": ("gymnasium", "gymnasium_text.py:GymnasiumText"),
    }
    path = write(tmp_path, *({"name": name, "class_name": given} for name, (given, _) in classes.items()))
    found = load_environments(path)
    for name, (_, address) in classes.items():
        assert found[name].address.replace("interaction:", "interaction.").endswith(address)
    assert found["c"].address == "verl.interactions.gsm8k_interaction:Gsm8kInteraction"


def test_an_entry_says_how_its_processes_are_started(tmp_path):
    entry = {"name": "a", "class_name": "mine.py:Maze", "config": {"size": 4}, "reward": "last", "num_processes": 3}
    entry |= {"python": sys.executable, "start_timeout_s": 9, "step_timeout_s": 1.5, "limits": {"memory_mb": 100}}
    [spec] = load_environments(write(tmp_path, entry)).values()
    expected = EnvironmentSpec("a", f"{tmp_path}/mine.py:Maze", {"size": 4}, "last", sys.executable, 3, 9, 1.5)
    assert spec == EnvironmentSpec(**{**vars(expected), "limits": RewardLimits(memory_mb=100)})


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"class_name": "absent.py:Maze"}, "class_name=absent.py:Maze: no file .*absent.py"),
        ({"class_name": "gymnasum"}, "class_name=gymnasum: names no class; did you mean gymnasium"),
        ({"class_name": "harbor"}, "class_name=harbor: is an example now; give .*/harbor_task.py:HarborTask"),
        ({"class_name": None}, "class_name=None: must be path/to/file.py:Name"),
        ({"name": 3}, "name=3: must be the name that rows use"),
        ({"config": [1]}, r"config=\[1\]: must have the arguments of the constructor"),
        ({"step_timeout": 3}, "step_timeout: there is no such key; did you mean step_timeout_s"),
        ({"step_timeout_s": 0}, "step_timeout_s=0: must be seconds above 0"),
        ({"num_processes": True}, "num_processes=True: must be from 1 to 4096"),
        ({"reward": "mean"}, "reward='mean': must be one of sum, last, none"),
        ({"python": "/absent/python"}, "python=/absent/python: there is no such program"),
        ({"limits": {"memory": 3}}, ".limits.memory: there is no such key"),
    ],
)
def test_a_wrong_entry_is_refused_with_its_place(tmp_path, entry, text):
    path = write(tmp_path, {"name": "a", "class_name": "mine.py:Maze", **entry})
    with pytest.raises(ConfigError, match=rf"interaction_config_path={path}: interaction\[0\].*{text}"):
        load_environments(path)


def test_wrong_files_are_refused(tmp_path):
    (tmp_path / "empty.yaml").write_text("[]")
    with pytest.raises(ConfigError, match="empty.yaml: has no list `interaction`"):
        load_environments(str(tmp_path / "empty.yaml"))
    with pytest.raises(ConfigError, match="absent.yaml: cannot be read"):
        load_environments(str(tmp_path / "absent.yaml"))
    twice = {"name": "a", "class_name": "mine.py:Maze"}
    with pytest.raises(ConfigError, match="there is another environment of this name"):
        load_environments(write(tmp_path, twice, twice))


def test_a_registered_class_is_known_by_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "ADDRESSES", addresses := {})
    monkeypatch.setattr("hybridrl.serving.environments.settings.ADDRESSES", addresses)
    file = tmp_path / "own.py"
    file.write_text(
        "from hybridrl.serving.environments import TextEnvironment, register_environment\n\n\n"
        "@register_environment('guess')\nclass Guess(TextEnvironment):\n    pass\n"
    )
    load_module(str(file))
    assert load_environments(None) == {"guess": EnvironmentSpec("guess", f"{file}:Guess")}


def test_a_row_names_its_environment():
    maze, game = EnvironmentSpec("maze", "m:Maze"), EnvironmentSpec("game", "m:Game")
    row = {"extra_info": {"interaction_kwargs": {"name": "game", "seed": 3, "size": None}}}
    assert spec_of_row({"maze": maze, "game": game}, row) == (game, {"seed": 3})
    unnamed = {"extra_info": {"interaction_kwargs": {"seed": 3}}}
    assert spec_of_row({"maze": maze}, unnamed) == (maze, {"seed": 3})
    with pytest.raises(ConfigError, match="name=None: there is no such environment"):
        spec_of_row({"maze": maze, "game": game}, unnamed)
    with pytest.raises(DataError, match="row 7 has no extra_info.interaction_kwargs"):
        spec_of_row({"maze": maze}, {"extra_info": {"index": 7}})


def test_the_lists_on_the_page_are_read_and_its_class_answers(tmp_path):
    text = PAGE.read_text()
    (source,) = re.findall(r"```python\n# my_env.py\n(.*?)```", text, re.DOTALL)
    (tmp_path / "my_env.py").write_text(source)
    names = []
    for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)):
        (tmp_path / f"{number}.yaml").write_text(block)
        names += load_environments(str(tmp_path / f"{number}.yaml"))
    assert names == ["guess", "lake", "echo", "sums"]
    assert [*load_environments(str(PAGE.parents[1] / "examples" / "harbor" / "environments.yaml"))] == ["harbor"]
    guess = load_module(str(tmp_path / "my_env.py")).Guess(largest=5)
    assert guess.reset({"kwargs": {"number": 3}}) == "I think of a number from 1 to 5. Which one?"
    assert guess.step("3") == ("", 1.0, True) and guess.step("4")[1:] == (0.0, False)
