"""`serve`: from a model to a server that answers until it is told to stop."""

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

#: Connections beyond the requests being served: those that wait between two requests, and those about to be refused.
IDLE = 512


def serve(
    opening: Opening,
    settings: Settings,
    *,
    on_ready: Callable[[Card, str], None] = lambda card, address: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; then answer what has been accepted, and return. Needs the main thread."""
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
            """As uvicorn does it, but a stop that was asked for is no failure."""
            yield

    listening = _listen(settings)
    address = f"http://{_host(settings.host)}:{listening.getsockname()[1]}"
    sys.setswitchinterval(0.001)  # a worker that has answered waits for no decoder to let go of the interpreter
    torch.set_num_threads(1)  # this process decodes in threads of its own; what computes are its workers
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # what is wrong with a form, its sender is told
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # pictures too large are refused
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
    """Signals go to who is in the list; before anybody is, they end the process as ever."""
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
    """The socket, before any work: a port that is taken is said at once."""
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
