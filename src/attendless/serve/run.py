"""`serve`: starts the workers and the HTTP server, and stops them after SIGTERM or Ctrl-C."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from PIL import Image

from ..errors import UserError
from ..export.packages import need
from ..predict import Card, Opening
from .settings import Settings

#: Connections in addition to requests in progress: idle ones, and those about to be refused.
IDLE = 512


def serve(
    opening: Opening,
    settings: Settings,
    *,
    on_ready: Callable[[Card, str], None] = lambda card, address: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish the accepted requests and return. Must run in the main thread.

    Args:
        opening: The model to serve.
        settings: Address, batching and limits.
        on_ready: Called with the description of the model and the address when the server accepts requests.

    Raises:
        UserError: The model cannot be opened, the address is in use, or a package is missing.
    """
    need("serve", "fastapi", "uvicorn", "python_multipart", "prometheus_client")
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    from .app import Desk, make_app
    from .connection import limited
    from .engine import Engine
    from .metrics import Metrics

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Replaces uvicorn's handlers, which raise the signal again after the shutdown."""
            yield

    listening = _listen(settings)
    address = f"http://{_host(settings.host)}:{listening.getsockname()[1]}"
    sys.setswitchinterval(0.001)  # threads of workers must not wait long for decoders to release the GIL
    torch.set_num_threads(1)  # the workers compute; this process only decodes, in its own threads
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # errors in forms are reported to the client
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # too large images are refused
    engine = Engine(opening, batch=settings.batch, wait_ms=settings.wait_ms, workers=settings.workers)
    with _stopping() as stop, contextlib.closing(listening):
        card = engine.start()
        try:
            desk = Desk(engine, card, settings)
            metrics = Metrics(settings.batch, lambda: desk.inside, engine.alive)
            engine.on_batch, engine.on_restart = metrics.on_batch, metrics.restarts.inc
            config = uvicorn.Config(
                make_app(engine, card, desk, metrics),
                log_level="error",
                access_log=False,
                lifespan="off",
                server_header=False,
                limit_concurrency=settings.queue + IDLE,
                http=limited(AutoHTTPProtocol),
            )
            server = Server(config)
            stop.append(server.handle_exit)
            on_ready(card, address)
            server.run(sockets=[listening])
        finally:
            engine.stop()


@contextlib.contextmanager
def _stopping() -> Iterator[list[Any]]:
    """Forward SIGINT and SIGTERM to the handlers in the yielded list; while it is empty, raise KeyboardInterrupt."""
    who: list[Any] = []
    before: dict[int, Any] = {}

    def stop(number: int, frame: Any) -> None:
        for one in who:
            one(number, frame)
        if not who:
            raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield who
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen(settings: Settings) -> socket.socket:
    """Open the socket before the model, so that a port in use is reported at once."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as undo:
            found = undo.enter_context(socket.socket(family, kind, protocol))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(place)
            found.listen(1024)
            undo.pop_all()
    except OSError as error:
        raise UserError(f"cannot listen at {settings.host} port {settings.port}: {error.strerror or error}") from None
    return found


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
