"""The endpoints of the server: POST /predict, and GET /, /health, /metrics."""

from __future__ import annotations

import asyncio
import html
import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from torch import Tensor

from ..predict import Card
from ..predict.answers import read_answers
from ..sizes import size_text
from ..stamp import cores
from .engine import Engine, Failed
from .hosts import KnownHosts
from .intake import FORMATS, Refused, read_body, read_picture
from .metrics import Counted, Metrics
from .settings import Settings

PAGE = Path(__file__).with_name("page.html")


class Desk:
    """Accepts requests up to the limit of the queue, decodes images in threads, and returns predictions."""

    def __init__(self, engine: Engine, card: Card, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.prepare, self.names = card.preparation(), card.names()
        decoders = max(1, cores() - engine.count * engine.threads)  # the cores that the model leaves free
        self.pool = ThreadPoolExecutor(decoders, "attendless image", initializer=_behind_the_model)
        self.inside = 0

    async def answer(self, request: Request, topk: int) -> dict[str, Any]:
        if self.inside >= self.settings.queue:
            raise Refused(503, f"the queue is full ({self.inside} requests): try again")
        self.inside += 1
        try:
            body = await read_body(request, self.settings.most_bytes)
            loop = asyncio.get_running_loop()
            future = await loop.run_in_executor(self.pool, self._submit, body)
            row = await asyncio.wrap_future(future)
        finally:
            self.inside -= 1
        (found,) = read_answers(row[None], [""], self.names, topk)
        return {name: value for name, value in found.as_dict().items() if name != "image"}

    def _submit(self, body: bytes) -> Future[Tensor]:
        """Decode, preprocess and queue an image; runs in a thread."""
        return self.engine.submit(self.prepare(read_picture(body, self.settings.most_pixels)))


def _behind_the_model() -> None:
    """Lower the priority of a decoding thread, so that decoding does not slow the model down."""
    if sys.platform == "linux":  # on Linux the priority is per thread, elsewhere per process
        os.nice(10)


def make_app(engine: Engine, card: Card, desk: Desk, metrics: Metrics) -> Any:
    """The ASGI application over a started engine."""
    app = FastAPI(title="attendless", docs_url=None, redoc_url=None)
    settings, about = desk.settings, _about(card)
    page = _page(about, settings, card)

    @app.post("/predict")
    async def predict(request: Request, topk: Annotated[int, Query(ge=1, le=10_000)] = settings.topk) -> JSONResponse:
        """Classify an image, given as the body or as a file of a form."""
        return JSONResponse({"model": about["model"], **await desk.answer(request, topk)})

    @app.get("/health")
    async def health() -> JSONResponse:
        alive = engine.alive()
        found = {"status": "ok" if alive else "starting a worker", "workers": alive, **about}
        return JSONResponse(found, 200 if alive else 503)

    @app.get("/metrics")
    async def measured() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", response_class=HTMLResponse)
    async def usage(request: Request) -> str:
        return page.replace("{address}", html.escape(str(request.base_url)))

    def wrong(status: int, kind: str, reason: str, **headers: str) -> JSONResponse:
        metrics.errors.labels(kind).inc()
        return JSONResponse({"error": reason}, status, headers)

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        # The unread part of a body would be parsed as the next request.
        more = {"Connection": "close"} if error.status in (408, 413, 503) else {}
        again = {"Retry-After": "1"} if error.status == 503 else {}
        return wrong(error.status, "overload" if error.status == 503 else "picture", error.reason, **more, **again)

    @app.exception_handler(Failed)
    async def failed(request: Request, error: Failed) -> JSONResponse:
        return wrong(500, "model", str(error))

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> JSONResponse:
        return wrong(400, "gone", "the client disconnected before the whole image arrived")

    @app.exception_handler(RequestValidationError)
    async def unfit(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return wrong(422, "request", f"{first['loc'][-1]}: {first['msg']}, got {first.get('input')!r}"[:300])

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        asked = f"{request.method} {request.url.path[:100]}"
        text = f"{error.detail}: {asked}; expected POST /predict, GET /, GET /health or GET /metrics"
        return wrong(error.status_code, "request", text, **(error.headers or {}))

    known = KnownHosts(app, (settings.host, *settings.allow_host))
    return Counted(known, metrics, time.monotonic)


def _about(card: Card) -> dict[str, Any]:
    found = card.description
    return {
        "model": Path(found.model).name,
        "attention": found.attention,
        "tokens_spec": found.tokens or None,
        "runtime": card.runtime,
        "size": list(found.size),
        "classes": card.scores,
        "features": card.features,
        "random_weights": card.random,
    }


def _page(about: dict[str, Any], settings: Settings, card: Card) -> str:
    rows = {
        "model": about["model"] + (" (random weights: predictions are meaningless)" if card.random else ""),
        "attention": about["attention"],
        "tokens": about["tokens_spec"] or "all",
        "runtime": about["runtime"],
        "images": f"{size_text(card.description.size)} px",
        "answers": f"{card.scores:,} classes" if card.scores else "none",
        "features": f"{card.features} numbers" if card.features else "none",
        "takes": f"{', '.join(FORMATS)} up to {settings.max_mb:g} MB and {settings.max_megapixels:g} megapixels",
    }
    cells = "\n".join(f"<tr><th>{key}</th><td>{html.escape(str(value))}</td></tr>" for key, value in rows.items())
    return PAGE.read_text(encoding="utf-8").replace("{rows}", cells)
