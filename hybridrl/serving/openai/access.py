"""Access to the endpoint: clients need the API key, and web pages of another origin are refused.

Called by `server` for every request. On a loopback address the endpoint needs no key.
"""

import hmac
import os

from aiohttp import web

from hybridrl.serving.openai.parameters import RequestError
from hybridrl.system.web_origin import refusal

API_KEY_VARIABLE = "HYBRIDRL_API_KEY"
OPEN_PATHS = ("/health",)  # need no key


def api_key_of_environment() -> str | None:
    """Return the key that clients must send; None: they need none."""
    return os.environ.get(API_KEY_VARIABLE) or None


def check_access(request: web.Request, *, listens_on: str, api_key: str | None) -> None:
    """Raise RequestError for a request without the key, of a web page of another origin, or with a compressed body."""
    if (reason := refusal(request.headers, listens_on=listens_on)) is not None:
        raise RequestError(reason, status=403)
    if api_key is not None and request.path not in OPEN_PATHS:
        _check_key(request, api_key)
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise RequestError("the header Content-Encoding is not supported; send the body as it is", status=415)


def _check_key(request: web.Request, api_key: str) -> None:
    sent = request.headers.get("Authorization", "").removeprefix("Bearer ") or request.headers.get("X-Api-Key", "")
    if not hmac.compare_digest(sent.encode("utf-8", "replace"), api_key.encode()):
        raise RequestError(f"the API key is wrong or missing; it is in {API_KEY_VARIABLE} of the server", status=401)
