"""The endpoint of the policy, for clients of OpenAI and Anthropic.

`requests` parses requests, `responses` writes answers, `apis` translates the formats of other APIs, `server` is the web
application between them and a `ReplicaRouter`.
"""

from hybridrl.serving.openai.server import Endpoint, ServedModel

__all__ = ["Endpoint", "ServedModel"]
