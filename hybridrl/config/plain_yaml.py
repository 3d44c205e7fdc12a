"""Read YAML that somebody else has written, such as the settings in a foreign checkpoint: plain data without aliases.

A few lines of aliases stand for billions of values, which then take the reader's memory and time.
"""

from typing import Any

import yaml


class _PlainLoader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node. Raises YAMLError for an alias."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(problem="has an alias", problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)


def load_plain_yaml(text: Any) -> Any:
    """Return the data in a text, bytes or an open file. Raises yaml.YAMLError for an alias, or what is no YAML."""
    return yaml.load(text, Loader=_PlainLoader)  # safe: a SafeLoader
