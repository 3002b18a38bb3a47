"""Crafted `.pt2` files that try to run a command when they are opened. Each is refused, and no command runs."""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import attendless
from attendless.errors import UserError
from attendless.export import export, open_runner, pt2_archive

Entries = list[tuple[str, bytes]]
GRAPH, WEIGHTS = "models/model.json", "data/weights/model_weights_config.json"
CONSTANTS, SAMPLE = "data/constants/model_constants_config.json", "data/sample_inputs/model.pt"


class Command:
    """Runs a shell command when it is unpickled."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.text,)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = attendless.Columnar(patch_size=16, embed_dim=16, depth=1, num_heads=2, num_classes=3, img_size=32)
    return export(model.eval(), tmp_path_factory.mktemp("pt2") / "good.pt2", measure=False).path


@pytest.fixture
def attack(tmp_path: Path) -> Iterator[Attack]:
    yield (made := Attack(tmp_path))
    assert not made.marker.exists(), "the command ran"


class Attack:
    """Writes a crafted file; `command` leaves a marker where it runs."""

    def __init__(self, folder: Path) -> None:
        self.file, self.marker = folder / "bad.pt2", folder / "ran"
        self.command = f"touch '{self.marker}'"

    def pickled(self) -> bytes:
        return pickle.dumps((Command(self.command),))

    def saved(self) -> bytes:
        buffer = io.BytesIO()
        torch.save((Command(self.command),), buffer)
        return buffer.getvalue()

    def write(self, entries: Entries, root: str = "good/") -> Path:
        with zipfile.ZipFile(self.file, "w") as target, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of zipfile, about two entries of one name
            for name, data in entries:
                target.writestr(root + name, data)
        return self.file

    def refused(self, match: str = "") -> None:
        with pytest.raises(UserError, match=rf"bad\.pt2.*{match}"):
            open_runner(self.file)(torch.zeros(1, 3, 32, 32))


def entries(file: Path) -> Entries:
    with zipfile.ZipFile(file) as archive:
        return [(name.partition("/")[2], archive.read(name)) for name in archive.namelist()]


def with_graph(file: Path, change: Callable[[dict[str, Any]], None]) -> Entries:
    """The entries of a file with its graph changed."""
    found = entries(file)
    graph = json.loads(dict(found)[GRAPH])
    change(graph)
    return [(name, json.dumps(graph).encode() if name == GRAPH else data) for name, data in found]


def test_a_copy_is_opened(good: Path, attack: Attack) -> None:
    open_runner(attack.write(entries(good)))(torch.zeros(1, 3, 32, 32))


def test_legacy_layout_without_a_root(good: Path, attack: Attack) -> None:
    found = dict(entries(good))
    legacy = [("version", b"8.20"), ("serialized_exported_program.json", found[GRAPH])]
    legacy += [(f"serialized_{what}.pt", attack.saved()) for what in ("state_dict", "constants", "example_inputs")]
    attack.write(legacy, root="")
    attack.refused()


@pytest.mark.parametrize("first", [True, False])
def test_two_entries_of_one_name(good: Path, attack: Attack, first: bool) -> None:
    found = entries(good)
    at = 0 if first else len(found)
    attack.write([*found[:at], (SAMPLE, attack.saved()), *found[at:]])
    attack.refused("twice")


@pytest.mark.parametrize("name", ["data/weights/model.PT", "data/weights/model.pt", "data/Sample_inputs/model.pt"])
def test_an_entry_that_exports_do_not_have(good: Path, attack: Attack, name: str) -> None:
    attack.write([*entries(good), (name, attack.saved())])
    attack.refused("holds")


def test_two_roots(good: Path, attack: Attack) -> None:
    attack.write([(f"good/{name}", data) for name, data in entries(good)] + [(f"a/{SAMPLE}", attack.saved())], root="")
    attack.refused("holds")


def test_the_sample_inputs_are_never_unpickled(good: Path, attack: Attack) -> None:
    attack.write([(name, attack.saved() if name == SAMPLE else data) for name, data in entries(good)])
    open_runner(attack.file)(torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize("name", ["opaque_obj_0", "custom_obj_0", "tensor_0", "../weights/weight_0"])
def test_constants_that_are_pickles(good: Path, attack: Attack, name: str) -> None:
    payload = {"path_name": name, "is_param": False, "use_pickle": name == "tensor_0", "tensor_meta": None}
    config = json.dumps({"config": {"evil": payload}}).encode()
    found = [(each, config if each == CONSTANTS else data) for each, data in entries(good)]
    attack.write([*found, (f"data/constants/{name}", attack.pickled())])
    attack.refused()


def test_weights_that_are_pickles(good: Path, attack: Attack) -> None:
    def changed(name: str, data: bytes) -> bytes:
        if name == WEIGHTS:
            return data.replace(b'"use_pickle": false', b'"use_pickle": true')
        return attack.saved() if name.startswith("data/weights/weight_") else data

    attack.write([(name, changed(name, data)) for name, data in entries(good)])
    attack.refused("weight")


@pytest.mark.parametrize("target", ["torch.os.system", "torch.ops.load_library", "_operator.call", "math.os"])
def test_nodes_that_call_more_than_operators(good: Path, attack: Attack, target: str) -> None:
    def change(graph: dict[str, Any]) -> None:
        nodes = graph["graph_module"]["graph"]["nodes"]
        arg = {"name": "command", "arg": {"as_string": attack.command}, "kind": 1}
        nodes.insert(0, nodes[0] | {"target": target, "inputs": [arg], "outputs": [], "name": "evil", "metadata": {}})

    attack.write(with_graph(good, change))
    attack.refused("operator")


def test_an_operator_that_calls_a_function(good: Path, attack: Attack) -> None:
    def change(graph: dict[str, Any]) -> None:
        nodes = graph["graph_module"]["graph"]["nodes"]
        given = ({"as_bool": True}, {"as_operator": "torch.os.system"}, {"as_string": attack.command})
        inputs = [{"name": "", "arg": arg, "kind": 1} for arg in given]
        evil = {"target": "torch.ops.higher_order.wrap_with_set_grad_enabled", "inputs": inputs, "outputs": []}
        nodes.insert(0, nodes[0] | evil | {"name": "evil", "metadata": {}})

    attack.write(with_graph(good, change))
    attack.refused("operator")


def test_an_operator_that_writes_files(good: Path, attack: Attack) -> None:
    def change(graph: dict[str, Any]) -> None:
        nodes = graph["graph_module"]["graph"]["nodes"]
        given = {"filename": {"as_string": str(attack.marker)}, "shared": {"as_bool": True}, "size": {"as_int": 4}}
        inputs = [{"name": name, "arg": arg, "kind": 1} for name, arg in given.items()]
        made = nodes[0] | {"target": "torch.ops.aten.from_file.default", "inputs": inputs, "metadata": {}}
        nodes.insert(0, made | {"outputs": nodes[0]["outputs"]})

    attack.write(with_graph(good, change))
    attack.refused("operator")


def test_names_that_are_code(good: Path, attack: Attack) -> None:
    """PyTorch generates source code with these names in it, and executes it."""
    code = f"images=__import__('os').system({attack.command!r})"

    def argument(graph: dict[str, Any]) -> None:
        graph["graph_module"]["module_call_graph"][0]["signature"]["forward_arg_names"] = [code]

    attack.write(with_graph(good, argument))
    attack.refused("name")
    attack.write([(n, d.replace(b'"images"', json.dumps(code).encode())) for n, d in entries(good)])
    attack.refused("name")


def test_containers_that_import_modules(good: Path, attack: Attack) -> None:
    """The context of a defaultdict names a module, which PyTorch would import."""
    context = json.dumps({"default_factory_module": "os", "default_factory_name": "abort", "dict_context": "[]"})
    evil = {"type": "collections.defaultdict", "context": context, "children_spec": []}

    def change(graph: dict[str, Any]) -> None:
        signature = graph["graph_module"]["module_call_graph"][0]["signature"]
        version, spec = json.loads(signature["in_spec"])
        spec["children_spec"][1] = evil
        signature["in_spec"] = json.dumps([version, spec])

    attack.write(with_graph(good, change))
    attack.refused("container")


@pytest.mark.parametrize("text", ["__import__('os').system('true')", "9**9**9**9", "(" * 5000 + ")" * 5000, "s0 <<9"])
def test_expressions_that_are_no_arithmetic(good: Path, attack: Attack, text: str) -> None:
    attack.write(with_graph(good, lambda graph: graph.update(guards_code=[text])))
    attack.refused("arithmetic")


def test_expressions_are_arithmetic() -> None:
    names = "Symbol('s34', positive=True, integer=True)"
    for good in (names, f"{names}**2", "2*s0 + 1", "L['images'].size()[1] == 3", "Mod(s1, 2)"):
        assert pt2_archive.arithmetic(good), good
    for bad in ("__import__('os')", "s0.__class__", "[x for x in s0]", "(lambda: 0)()", "open('x')", "2**99", "s0**s0"):
        assert not pt2_archive.arithmetic(bad), bad


def test_compressed_entries_are_refused(good: Path, attack: Attack) -> None:
    """A small file could unpack to any size."""
    with zipfile.ZipFile(attack.file, "w", zipfile.ZIP_DEFLATED) as target:
        for name, data in entries(good):
            target.writestr(f"good/{name}", data)
    attack.refused("compressed")


def test_weights_larger_than_their_bytes_are_refused(good: Path, attack: Attack) -> None:
    config = json.loads(dict(entries(good))[WEIGHTS])
    first = next(iter(config["config"].values()))
    first["tensor_meta"]["sizes"] = [{"as_int": 10**12}]
    first["tensor_meta"]["strides"] = [{"as_int": 0}]
    attack.write([(n, json.dumps(config).encode() if n == WEIGHTS else d) for n, d in entries(good)])
    attack.refused("weight")


def test_a_file_names_no_folders_of_the_machine_that_made_it(good: Path) -> None:
    content = good.read_bytes()
    for text in (str(Path(attendless.__file__).parent), str(Path(torch.__file__).parent), str(Path.home()), "File \\"):
        assert text.encode() not in content
