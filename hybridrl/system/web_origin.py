"""Rule for HTTP requests that this machine answers: none of web pages of strangers.

A browser on the same machine runs pages of strangers. Such a page sends its `Origin`, or a `Host` that it made point to
127.0.0.1.
"""

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit


def is_loopback(host: str | None) -> bool:
    """Return whether a name or an address is this machine's own."""
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def refusal(headers: Mapping[str, str], *, listens_on: str) -> str | None:
    """Return why a request may be that of a web page of another origin; None: it is not.

    Args:
        headers: Of the request.
        listens_on: Address that the server listens at.
    """
    host = _hostname_of(f"//{headers.get('Host', '')}")
    if is_loopback(listens_on) and not is_loopback(host):
        return "the header Host names another machine; use http://127.0.0.1"
    origin = headers.get("Origin")
    if origin is not None and _hostname_of(origin) != host:
        return "web pages of other origins get no answer here"
    return None


def _hostname_of(url: str) -> str | None:
    """Return the host in a URL, without brackets and port; None if there is none."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
