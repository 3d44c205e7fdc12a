"""The endpoint of the policy, for clients of OpenAI and Anthropic.

`requests` parses requests, `choice` has the responses, `apis` writes them in the format of each API. `server` is the
web application between them and a `ReplicaRouter`.
"""

from hybridrl.serving.openai.parameters import ServedModel
from hybridrl.serving.openai.server import Endpoint

__all__ = ["Endpoint", "ServedModel"]
