"""The server: every answer is the model's own, every bad request is refused with a reason, a killed worker is replaced
and loses nobody's answer, and a stop finishes what was accepted."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import runpy
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import attendless
from attendless.predict import Opening
from attendless.serve import Settings
from attendless.stamp import cores

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi", reason="FastAPI is not installed: pip install 'attendless[serve]'")

from attendless.serve import intake  # noqa: E402
from attendless.serve.app import Desk, make_app  # noqa: E402
from attendless.serve.engine import Engine, Failed  # noqa: E402
from attendless.serve.metrics import Metrics  # noqa: E402
from attendless.serve.slots import Shape, Slots  # noqa: E402

BENCHMARK = Path(__file__).resolve().parents[1] / "benchmarks" / "serve.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    attendless.save(timm.create_model("columnar_micro_patch4_32", num_classes=6), path)
    return path


@pytest.fixture(scope="module")
def engine(saved: Path) -> Iterator[Engine]:
    """One worker for all tests; it takes seconds to start."""
    made = Engine(Opening(str(saved), features=True, threads=1), batch=4, wait_ms=20)
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def plain(saved: Path) -> Any:
    """The same model in this process."""
    return Opening(str(saved), features=True).open()


@pytest.fixture
def desk(engine: Engine) -> Desk:
    return Desk(engine, engine.card, Settings(batch=4, queue=4, max_mb=0.1, max_megapixels=0.01))


@pytest.fixture
def app(engine: Engine, desk: Desk) -> Any:
    return make_app(engine, engine.card, desk, Metrics(4, lambda: desk.inside, engine.alive))


def ask(app: Any, method: str, path: str, **more: Any) -> Any:
    """One request, without a network."""
    import asyncio

    async def send() -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.request(method, path, **more)

    return asyncio.run(send())


def png(pixels: np.ndarray) -> bytes:
    found = io.BytesIO()
    Image.fromarray(pixels).save(found, "PNG")
    return found.getvalue()


def noise(count: int, side: int = 32) -> np.ndarray:
    return np.random.default_rng(count).integers(256, size=(count, side, side, 3), dtype=np.uint8)


# Answers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["body", "form"])
def test_an_answer_is_the_models_own(app: Any, plain: Any, how: str) -> None:
    picture = png(noise(1, 48)[0])
    sent = {"content": picture} if how == "body" else {"files": {"anything": ("x.txt", picture)}}
    found = ask(app, "POST", "/predict?topk=3", **sent)
    assert found.status_code == 200, found.text
    pixels = plain.card.preparation()(Image.open(io.BytesIO(picture)))
    row = plain(torch.from_numpy(pixels.copy())[None])[0]
    best = row[:6].softmax(0).topk(3)
    assert [answer["class"] for answer in found.json()["answers"]] == best.indices.tolist()
    given = [answer["probability"] for answer in found.json()["answers"]]
    assert given == pytest.approx(best.values.tolist(), abs=1e-5)
    assert found.json()["features"] == pytest.approx(row[6:].tolist(), abs=1e-4)


def test_many_threads_get_their_own_answers(engine: Engine, plain: Any) -> None:
    pixels = noise(60)
    expected = plain(torch.from_numpy(pixels))
    sizes: list[int] = []
    engine.on_batch = lambda size, seconds: sizes.append(size)
    with ThreadPoolExecutor(16) as pool:
        found = torch.stack(list(pool.map(lambda one: engine.submit(one).result(60), pixels)))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert sum(sizes) == 60
    assert max(sizes) <= 4
    assert len(sizes) < 60, "some were computed together"


def test_a_killed_worker_is_replaced_and_loses_no_answer(engine: Engine, plain: Any) -> None:
    pixels = noise(40)
    expected = plain(torch.from_numpy(pixels))
    restarts: list[int] = []
    engine.on_restart = lambda: restarts.append(1)
    (victim,) = engine.processes()
    futures = []
    for number, one in enumerate(pixels):
        if number == 10:
            os.kill(victim, signal.SIGKILL)
        futures.append(engine.submit(one))
    found = torch.stack([future.result(120) for future in futures])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert restarts
    assert engine.processes() != [victim]


@pytest.mark.slow
def test_an_idle_worker_that_dies_is_replaced(engine: Engine) -> None:
    (victim,) = engine.processes()
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + 120
    while engine.processes() in ([], [victim]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert engine.processes() not in ([], [victim])
    assert engine.submit(noise(1)[0]).result(60).isfinite().all()


def test_a_batch_that_no_worker_survives_is_given_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from attendless.serve.worker import Lost

    (line,) = engine.lines
    monkeypatch.setattr(line, "_restart", lambda: None)
    monkeypatch.setattr(line.worker, "answer", lambda places: (_ for _ in ()).throw(Lost))
    with pytest.raises(Failed, match="3 times with this batch"):
        engine.submit(noise(1)[0]).result(60)


def test_what_a_model_cannot_answer_is_said(engine: Engine, app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = engine.lines
    monkeypatch.setattr(line.worker, "answer", lambda places: "RuntimeError: no")
    found = ask(app, "POST", "/predict", content=png(noise(1)[0]))
    assert (found.status_code, found.json()) == (500, {"error": "RuntimeError: no"})


def test_nan_is_no_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = engine.lines

    def answer(places: list[int]) -> None:
        engine.slots.answers[places] = float("nan")

    monkeypatch.setattr(line.worker, "answer", answer)
    with pytest.raises(Failed, match="NaN"):
        engine.submit(noise(1)[0]).result(60)


def test_slots_are_the_same_memory() -> None:
    one = Slots(Shape(3, (4, 5, 3), 7))
    other = Slots(one.shape, one.name)
    one.pictures[2] = 9
    other.answers[1] = 0.5
    assert (other.pictures[2] == 9).all()
    assert (one.answers[1] == 0.5).all()
    other.close()
    one.close()
    with pytest.raises(FileNotFoundError):
        Slots(one.shape, one.name)


KEPT = """
import resource, torch
from attendless.measure.malloc import keep_memory
keep_memory()
def layers():
    for _ in range(20):
        given = [torch.ones(2**20 * size) for size in (1, 2, 3)]
        del given
layers()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
layers()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_a_worker_keeps_the_memory_its_next_batch_wants() -> None:
    """Twenty layers take 120,000 pages in all. (Left alone, glibc gives them back or not, as it thinks best.)"""
    faults = int(subprocess.run([sys.executable, "-c", KEPT], capture_output=True, check=True).stdout)
    assert faults < 100


def test_too_little_shared_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(attendless.UserError, match="MB of shared memory are needed"):
        Slots(Shape(3, (400, 500, 3), 7))


@pytest.mark.slow
def test_a_model_that_cannot_be_opened_again_is_no_endless_wait(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file has gone, say: the batch is given up, and once the file is there again so are answers."""
    opening = engine.opening
    (victim,) = engine.processes()
    monkeypatch.setattr(engine, "opening", dataclasses.replace(opening, model="nothing_like_it"))
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(Failed, match="could not be started, 3 times"):
        engine.submit(noise(1)[0]).result(300)
    assert engine.alive() == 0
    monkeypatch.setattr(engine, "opening", opening)
    deadline = time.monotonic() + 120
    while not engine.alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert engine.submit(noise(1)[0]).result(120).isfinite().all()


# Refusals ------------------------------------------------------------------------------------------------------------


def bomb() -> bytes:
    """A PNG that claims 60,000 x 60,000 pixels in a few bytes."""
    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"x")) + chunk(b"IEND", b"")


FORM = {"Content-Type": "multipart/form-data; boundary=x"}
FIELD = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n--x--\r\n'
REFUSALS = {
    "nothing": (400, "body is empty", {"content": b""}),
    "text": (415, "the body is not an image", {"content": b"hello"}),
    "a page called a picture": (415, "not an image", {"content": b"<svg/>", "headers": {"Content-Type": "image/png"}}),
    "half a picture": (422, "damaged", {"content": png(noise(1, 64)[0])[:2000]}),
    "a bomb": (413, "pixels", {"content": bomb()}),
    "many pixels": (413, "has 200 x 100 pixels", {"content": png(np.zeros((100, 200, 3), np.uint8))}),
    "many bytes": (413, "larger than 0.1 MB", {"content": b"\0" * 200_000}),
    "no form": (400, "form cannot be read", {"content": b"nothing", "headers": FORM}),
    "a form without boundary": (400, "form", {"content": b"-", "headers": {"Content-Type": "multipart/form-data"}}),
    "a form without file": (400, "contains no file", {"content": FIELD, "headers": FORM}),
    "two files": (400, "form cannot be read", {"files": {"a": b"1", "b": b"2"}}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_bad_requests_are_refused_with_a_reason(app: Any, name: str) -> None:
    status, reason, sent = REFUSALS[name]
    found = ask(app, "POST", "/predict", **sent)
    assert found.status_code == status, found.text
    assert reason in found.json()["error"]


def test_a_thin_picture_takes_little_time(app: Any) -> None:
    began = time.monotonic()
    assert ask(app, "POST", "/predict", content=png(np.zeros((1, 9_999, 3), np.uint8))).status_code == 200
    assert time.monotonic() - began < 2


def test_a_request_for_another_host_is_refused(app: Any) -> None:
    found = ask(app, "GET", "/health", headers={"Host": "evil.example"})
    assert found.status_code == 403
    assert "evil.example" in found.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("POST", "/predict?topk=0", 422, "topk"),
        ("POST", "/predict?topk=many", 422, "topk"),
        ("GET", "/predict", 405, "POST /predict"),
        ("POST", "/nothing", 404, "POST /predict"),
    ],
)
def test_wrong_addresses(app: Any, method: str, path: str, status: int, says: str) -> None:
    found = ask(app, method, path)
    assert found.status_code == status
    assert says in found.json()["error"]


def test_a_slow_client_is_not_waited_for(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    monkeypatch.setattr(intake, "TO_SEND", 0.05)

    async def slowly() -> Any:
        yield b"\x89"
        await asyncio.sleep(5)
        yield b"PNG"

    found = ask(app, "POST", "/predict", content=slowly())
    assert found.status_code == 408
    assert "did not arrive" in found.json()["error"]


def test_overload_is_told_to_come_again(app: Any, desk: Desk) -> None:
    desk.inside = 4
    found = ask(app, "POST", "/predict", content=png(noise(1)[0]))
    assert found.status_code == 503
    assert found.headers["retry-after"] == "1"
    assert desk.inside == 4
    desk.inside = 3
    assert ask(app, "POST", "/predict", content=png(noise(1)[0])).status_code == 200
    assert ask(app, "POST", "/predict", content=b"junk").status_code == 415
    assert desk.inside == 3, "whatever happened to it, its place is free again"


# What it says of itself ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
def test_pictures_of_the_next_batch_wait_for_the_model(desk: Desk, engine: Engine) -> None:
    """On cores the model leaves, and behind it where those are short; nothing else is put back."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert desk.pool.submit(os.getpriority, os.PRIO_PROCESS, 0).result() == min(19, own + 10)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
    assert all(os.getpriority(os.PRIO_PROCESS, worker) == own for worker in engine.processes())
    assert desk.pool._max_workers == max(1, cores() - engine.count * engine.threads)


def test_health_metrics_and_page(app: Any, engine: Engine) -> None:
    assert ask(app, "GET", "/health").json()["status"] == "ok"
    ask(app, "POST", "/predict", content=b"junk")
    measured = ask(app, "GET", "/metrics").text
    assert 'attendless_requests_total{status="415"} 1.0' in measured
    assert 'attendless_errors_total{kind="picture"} 1.0' in measured
    page = ask(app, "GET", "/").text
    assert "http://localhost/predict" in page
    assert "<script" not in page
    assert "//" not in page.replace("http://localhost/", ""), "nothing comes from elsewhere"


def test_health_while_no_worker_is_there(app: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.lines[0], "answering", False)
    assert ask(app, "GET", "/health").status_code == 503


def test_a_model_that_cannot_be_opened_is_said(tmp_path: Path) -> None:
    with pytest.raises(attendless.UserError, match="unknown model 'nothing'"):
        Engine(Opening("nothing")).start()


# The command ----------------------------------------------------------------------------------------------------------


def test_the_verb_serves_and_stops_when_asked(saved: Path, tmp_path: Path) -> None:
    """SIGTERM while requests are under way: they are answered, the exit code is 0."""
    ready = tmp_path / "ready.json"
    words = ["serve", str(saved), "--port", "0", "--json", str(ready), "--wait-ms", "1500", "--batch", "8"]
    server = subprocess.Popen([sys.executable, "-m", "attendless", *words], stderr=subprocess.PIPE, text=True)
    try:
        while not ready.exists():
            assert server.poll() is None, server.communicate()
            time.sleep(0.05)
        address = json.loads(ready.read_text())["rows"][0]["address"]
        assert address.startswith("http://127.0.0.1:")
        found: list[int] = []
        picture = png(noise(1)[0])
        threads = [
            threading.Thread(
                target=lambda: found.append(httpx.post(f"{address}/predict", content=picture, timeout=60).status_code)
            )
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        inside = "attendless_requests_inside 3.0"  # they wait for others to come
        while inside not in httpx.get(f"{address}/metrics", timeout=60).text and len(found) < 3:
            time.sleep(0.02)
        server.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        said = server.communicate(timeout=60)[1]
    finally:
        server.kill()
    assert found == [200, 200, 200]
    assert server.returncode == 0
    assert "all accepted requests are finished" in said


@pytest.mark.slow
@pytest.mark.data
def test_under_load_with_garbage_and_kills(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's load, smaller; its speed is the benchmark's own matter, on an idle machine."""
    load = runpy.run_path(str(BENCHMARK))
    weights = str(data_dir / "weights" / "deit_tiny_patch16_224.safetensors")
    predictor = Opening("deit_tiny_patch16_224", weights=weights).open()
    files = load["spread"](load["find_pictures"]([data_dir / "imagenet-mini" / "eval"]), 40)
    prepare = predictor.card.preparation()
    pixels = torch.stack([torch.from_numpy(prepare(Image.open(path).convert("RGB")).copy()) for path in files])
    expected = predictor(pixels).softmax(1)
    args = SimpleNamespace(model="deit_tiny_patch16_224", weights=weights, attention=None, size=None, requests=600,
                           concurrent=16, garbage=0.05, kills=2, batch=8, threads=1)  # fmt: skip
    import asyncio

    found = asyncio.run(load["Load"](args, [Path(path).read_bytes() for path in files], expected).run())
    assert not found["wrong"], found["wrong"][:5]
    assert found["restarts"] == 2
    assert found["growth"] < 0.05
