"""Host names of a server, as a protection against DNS rebinding.

The name of an attacker's web page can resolve to 127.0.0.1, and the browser then treats this server as part of the
page. The browser still sends the attacker's name in the header `Host`. So requests must name this server by an IP
address, `localhost`, or a configured name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse


class KnownHosts:
    """ASGI middleware: refuses requests for a host that is neither an IP address, `localhost` nor in `names`. `*` in
    `names` accepts every host."""

    def __init__(self, app: Any, names: Collection[str]) -> None:
        self.app, self.names = app, frozenset(name.lower() for name in names)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket"):
            host = Headers(scope=scope).get("host", "")
            if not is_known(host, self.names):
                reason = f"the host {host[:100]!r} is not a name of this server; serve with --allow-host to add it"
                await JSONResponse({"error": reason}, 403)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def is_known(host: str, names: Collection[str]) -> bool:
    """Whether a `Host` header, with or without a port, names this server. Without the header (HTTP/1.0) it does: a
    browser always sends one."""
    if not host or "*" in names:
        return True
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        if name == "localhost" or name in names:
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
