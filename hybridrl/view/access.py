"""Who may see the page.

On a loopback address no token is needed, but the request must name this machine, so that a web page of a stranger
cannot read along. On any other address a request needs the token of the link that `hybridrl view` prints.
"""

import hmac
from collections.abc import Mapping

from hybridrl.system.web_origin import hostname_of, is_loopback

COOKIE = "hybridrl_view"
TOKEN_PARAMETER = "token"


class AccessError(Exception):
    """A request is refused.

    Attributes:
        status: HTTP status.
    """

    def __init__(self, text: str, *, status: int) -> None:
        super().__init__(text)
        self.status = status


def check_access(
    headers: Mapping[str, str], *, sent: str | None, listens_on: str, token: str | None, path: str = "/"
) -> None:
    """Raise AccessError for a request of another origin, or without the token.

    Args:
        headers: Of the request.
        sent: The token in its link or its cookie.
        listens_on: The address that the page listens at.
        token: The token that is needed; None on a loopback address.
        path: Of the request.
    """
    host = hostname_of(f"//{headers.get('Host', '')}")
    if is_loopback(listens_on) and not is_loopback(host):
        raise AccessError("the header Host names another machine; open http://127.0.0.1", status=403)
    origin = headers.get("Origin")
    if origin is not None and hostname_of(origin) != host:
        raise AccessError("web pages of other origins may not read this one", status=403)
    if headers.get("Sec-Fetch-Site") == "cross-site" and path != "/":
        raise AccessError("web pages of other sites may not load parts of this one", status=403)
    if token is not None and not hmac.compare_digest((sent or "").encode("utf-8", "replace"), token.encode()):
        raise AccessError("the token is wrong or missing; open the link that `hybridrl view` has printed", status=401)
