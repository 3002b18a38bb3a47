"""How the server is set up, in plain values."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Settings:
    """`batch` pictures are computed at once, gathered for `wait_ms`; `queue` requests are served at a time, more are
    told to come again. Requests name the server by an IP address, `localhost`, `host` or a name of `allow_host`."""

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
