"""Whom the address of a request names: used where this machine serves HTTP, against web pages of strangers.

A browser on the same machine runs pages of strangers. Such a page sends its `Origin`, or a `Host` that it made point to
127.0.0.1.
"""

import ipaddress
from urllib.parse import urlsplit


def is_loopback(host: str | None) -> bool:
    """Return whether a name or an address is this machine's own."""
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def hostname_of(url: str) -> str | None:
    """Return the host in a URL, without brackets and port; None if there is none."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
