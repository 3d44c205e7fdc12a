"""An OpenAI-compatible endpoint of the policy: `/v1/models`, `/v1/completions`, `/v1/chat/completions`.

`questions` reads what is asked, `answers` writes what is said, `server` is the web application between them and a
`Router`.
"""

from hybridrl.serving.openai.server import Endpoint, Served

__all__ = ["Endpoint", "Served"]
