"""Who may use the endpoint: the API key, and no web page of another origin.

Called by `server` for every request. On a loopback address the endpoint needs no key, but a browser on the same machine
runs pages of strangers. Such a page sends its `Origin`, or a `Host` that it made point to 127.0.0.1.
"""

import hmac
import os

from aiohttp import web

from hybridrl.serving.openai.parameters import RequestError
from hybridrl.system.web_origin import hostname_of, is_loopback

API_KEY_VARIABLE = "HYBRIDRL_API_KEY"
OPEN_PATHS = ("/health",)  # need no key


def api_key_of_environment() -> str | None:
    """Return the key that clients must send; None: they need none."""
    return os.environ.get(API_KEY_VARIABLE) or None


def check_access(request: web.Request, *, listens_on: str, api_key: str | None) -> None:
    """Raise RequestError for a request without the key, or of a web page of another origin."""
    host = hostname_of(f"//{request.headers.get('Host', '')}")
    if is_loopback(listens_on) and not is_loopback(host):
        raise RequestError("the header Host names another machine; use http://127.0.0.1", status=403)
    origin = request.headers.get("Origin")
    if origin is not None and hostname_of(origin) != host:
        raise RequestError("web pages of other origins may not use this endpoint", status=403)
    if api_key is None or request.path in OPEN_PATHS:
        return
    sent = request.headers.get("Authorization", "").removeprefix("Bearer ") or request.headers.get("X-Api-Key", "")
    if not hmac.compare_digest(sent.encode("utf-8", "replace"), api_key.encode()):
        raise RequestError(f"the API key is wrong or missing; it is in {API_KEY_VARIABLE} of the server", status=401)
