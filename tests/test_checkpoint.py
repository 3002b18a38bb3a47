"""Checkpoints: what goes in comes out, bit for bit; what is damaged is refused; what is cut off never appears."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attendless.errors import UserError
from attendless.train.checkpoint import Damaged, Store, load, save
from train_toys import toy_vit

leaves = st.one_of(st.none(), st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False), st.text())
keys = st.one_of(st.text(max_size=8), st.integers(-5, 5), st.just("$tensor"), st.just("$dict"))
trees = st.recursive(leaves, lambda inner: st.one_of(st.lists(inner), st.dictionaries(keys, inner)), max_leaves=20)


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@settings(max_examples=50, deadline=None)
@given(tree=trees)
def test_any_tree_comes_back(tmp_path_factory: pytest.TempPathFactory, tree: object) -> None:
    path = tmp_path_factory.mktemp("tree") / "c.safetensors"
    save(path, tree)
    assert same(tree, load(path))


def example() -> dict:
    """A model, its optimiser after a step, and tensors of every awkward kind."""
    model = toy_vit()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    optimizer.step()
    whole = torch.arange(12.0)
    kinds = [torch.ones(2, dtype=torch.bfloat16), torch.zeros(0, 3), torch.tensor(7), torch.tensor([True]), whole[3:7]]
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "kinds": [*kinds, whole.view(3, 4).T, whole.double()],
        "numbers": (1, 2.5, float("inf"), None),
    }


def test_a_whole_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    tree = example()
    save(tmp_path / "c", tree)
    assert same(tree, load(tmp_path / "c"))


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    weight = torch.randn(1000)
    save(tmp_path / "c", {"a": weight, "b": weight})
    assert (tmp_path / "c").stat().st_size < 5500
    assert same(load(tmp_path / "c"), {"a": weight, "b": weight})


def test_what_cannot_be_kept_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="set"):
        save(tmp_path / "c", {"x": {1, 2}})
    assert list(tmp_path.iterdir()) == []


def test_thousands_of_damaged_files(tmp_path: Path) -> None:
    """One flipped bit anywhere, cuts, made-up bytes: `Damaged`, never another error and never a wrong value."""
    tree = {"model": {"w": torch.randn(40), "b": torch.arange(3)}, "progress": {"step": 12, "best": 61.5}}
    sound = tmp_path / "sound"
    save(sound, tree)
    content, draw, path = sound.read_bytes(), random.Random(0), tmp_path / "damaged"
    header = int.from_bytes(content[:8], "little") + 8
    for i in range(3000):
        out = bytearray(content)
        kind = i % 5
        if kind == 0:
            out = out[: draw.randrange(len(out))]
        elif kind == 1:
            out = bytearray(draw.randbytes(draw.randrange(300)))
        elif kind == 2:
            out[draw.randrange(len(out))] ^= 1 << draw.randrange(8)
        elif kind == 3:
            out[draw.randrange(header)] = draw.randrange(32, 127)
        else:
            start = draw.randrange(len(out))
            out[start : start + draw.randrange(20)] = draw.randbytes(draw.randrange(20))
        path.write_bytes(out)
        try:
            found = load(path)
        except Damaged as error:
            assert "damaged" in str(error)
        else:
            assert same(tree, found)


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, tmp_path / "bare")
    with pytest.raises(Damaged, match="not a checkpoint"):
        load(tmp_path / "bare")
    torch.save({"w": torch.ones(2)}, tmp_path / "pickled")
    with pytest.raises(Damaged):
        load(tmp_path / "pickled")
    with pytest.raises(Damaged):
        load(tmp_path / "nowhere")


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    for step in (1, 2, 10, 11):
        store.write(step, {"step": step})
    assert store.steps() == [10, 11]
    assert store.read(pytest.fail) == {"step": 11}


def test_falls_back_and_says_so(tmp_path: Path) -> None:
    store, said = Store(tmp_path, keep=3), list[str]()
    for step in (1, 2, 3):
        store.write(step, {"step": step})
    store.path(3).write_bytes(store.path(3).read_bytes()[:-1])
    store.path(2).write_bytes(b"")
    (tmp_path / ".step-4.safetensors.123.tmp").write_bytes(b"half")
    assert store.read(said.append) == {"step": 1}
    assert [name in text for name, text in zip(("step-3", "step-2"), said, strict=True)] == [True, True]
    assert store.steps() == [1]
    assert not list(tmp_path.glob(".*.tmp"))
    store.path(1).write_bytes(b"")
    with pytest.raises(UserError, match="every checkpoint"):
        store.read(said.append)


def test_nothing_yet(tmp_path: Path) -> None:
    assert Store(tmp_path / "none").read(pytest.fail) is None


WRITER = """
import sys, torch
from attendless.train.checkpoint import Store
store = Store(sys.argv[1], keep=2)
step = 0
while True:
    step += 1
    store.write(step, {"step": step, "w": torch.full((200_000,), float(step))})
    if step == 3:
        print("ready", flush=True)
"""


def test_a_kill_while_writing_leaves_only_whole_files(tmp_path: Path) -> None:
    words = [sys.executable, "-c", WRITER, str(tmp_path)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    time.sleep(random.Random(os.getpid()).uniform(0, 0.2))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    for step in Store(tmp_path).steps():
        tree = load(Store(tmp_path).path(step))
        assert tree["step"] == step
        assert bool((tree["w"] == step).all())


def test_the_header_is_plain_json(tmp_path: Path) -> None:
    """Anyone can look into a checkpoint without this package."""
    from safetensors import safe_open

    save(tmp_path / "c", {"step": 3})
    with safe_open(tmp_path / "c", framework="pt") as file:
        assert json.loads(file.metadata()["tree"]) == {"$dict": [["step", 3]]}
