"""An OpenAI-compatible endpoint of the policy: `/v1/models`, `/v1/completions`, `/v1/chat/completions`.

`requests` parses requests, `responses` writes answers, `server` is the web application between them and a
`ReplicaRouter`.
"""

from hybridrl.serving.openai.server import Endpoint, ServedModel

__all__ = ["Endpoint", "ServedModel"]
