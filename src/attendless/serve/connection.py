"""HTTP connections with two limits: the headers of a request must arrive in time, and a client that is still sending a
refused request gets a few seconds to read the response.

The system resets a connection that is closed while bytes of the client are unread, and the client may lose the
response. So the server closes its own side, discards what the client still sends, and closes the connection when the
client does, or after a few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

#: Seconds that a client has to send the headers of a request, and to read the response to a refused request.
TO_SEND_HEAD, TO_READ = 10.0, 5.0


class Lingering:
    """A transport that closes at once if everything was read (`unread` returns False), otherwise after a delay."""

    def __init__(self, transport: Any, unread: Callable[[], bool]) -> None:
        self._transport, self._unread, self.lingers = transport, unread, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.lingers or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing() or not self._unread():
            self._transport.close()
            return
        self.lingers = True
        self._transport.write_eof()
        with contextlib.suppress(RuntimeError):  # raised if reading was not paused
            self._transport.resume_reading()
        asyncio.get_running_loop().call_later(TO_READ, self._transport.abort)


def limited(protocol: Any) -> Any:
    """A uvicorn protocol class with both limits."""

    class Limited(protocol):
        head_due: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(Lingering(transport, self._unread))
            self._expect_head()

        def data_received(self, data: bytes) -> None:
            if not self.transport.is_closing():
                super().data_received(data)
                self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget_head()
            super().connection_lost(exc)

        def _unread(self) -> bool:
            return self.cycle is not None and self.cycle.more_body

        def _expect_head(self) -> None:
            """Start the timer unless it runs or a request is in progress; stop it when the headers are complete."""
            answering = self.cycle is not None and not self.cycle.response_complete
            if answering:
                self._forget_head()
            elif self.head_due is None:
                self.head_due = self.loop.call_later(TO_SEND_HEAD, self._refuse)

        def _forget_head(self) -> None:
            if self.head_due is not None:
                self.head_due.cancel()
                self.head_due = None

        def _refuse(self) -> None:
            self.head_due = None
            if self.transport.is_closing():
                return
            body = json.dumps({"error": f"the headers did not arrive within {TO_SEND_HEAD:g} seconds"})
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
            self.transport.write(f"HTTP/1.1 408 Request Timeout\r\n{head}\r\n\r\n{body}".encode())
            self.transport.close()

    return Limited
