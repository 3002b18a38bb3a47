"""Settings of the server."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Settings:
    """Address, batching and limits of a server.

    host, port: Address to listen on; port 0 takes a free one.
    batch: Images per forward pass.
    wait_ms: Milliseconds that an image waits for others.
    workers: Processes that hold the model.
    queue: Requests in progress; more receive status 503.
    topk: Predictions per image, unless the request sets another number.
    max_mb, max_megapixels: Largest body and largest image.
    allow_host: Host names accepted besides IP addresses, `localhost` and `host`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    batch: int = 8
    wait_ms: float = 5.0
    workers: int = 1
    queue: int = 64
    topk: int = 5
    max_mb: float = 10.0
    max_megapixels: float = 50.0
    allow_host: tuple[str, ...] = ()

    @property
    def most_bytes(self) -> int:
        return int(self.max_mb * 1e6)

    @property
    def most_pixels(self) -> int:
        return int(self.max_megapixels * 1e6)
