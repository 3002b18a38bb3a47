"""The explorer's page, served by a process of its own as users start it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def served(*words: str) -> Iterator[str]:
    """Inside, `attendless explore` with these words answers at the address given; at the end Ctrl-C is pressed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "attendless", "explore", "--port", str(port), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Where the suite itself runs in the background, Ctrl-C is ignored by all that it starts, unless told otherwise.
    with subprocess.Popen(command, **pipes, preexec_fn=_hears_ctrl_c) as process:
        try:
            address = process.stdout.readline().split(" ")[0]
            if not address:
                raise RuntimeError(process.stderr.read())
            yield address
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, said
    lines = [line for line in said.splitlines() if not line.startswith("random weights")]
    assert lines == ["attendless: stopped"], said


def _hears_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
