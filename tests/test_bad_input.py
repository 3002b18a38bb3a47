"""Every mistake that a command line can hold, each with one command: exit code 2, one line that names what is wrong,
and nothing on disk changed. `WIRING` tries the mistakes of shared arguments with every command that has them."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import attendless
from attendless_cli.main import COMMANDS, main
from attendless_cli.parser import Parser

MODEL = "columnar_micro_patch4_32"
#: What each command is given besides the mistake. All of it is sound: an option given twice counts as given last.
SOUND = {
    "info": (MODEL,),
    "convert": (MODEL, "--attention", "foveal:keep=0.5"),
    "bench": (MODEL, "--quick", "--budget", "0.01"),
    "eval": (MODEL, "--data", "loose", "--workers", "0"),
    "predict": (MODEL, "loose"),
    "serve": (MODEL, "--port", "0"),
    "tune": (MODEL, "--data", "loose", "--images", "2"),
    "export": (MODEL, "--out", "fast.pt2", "--quick"),
    "optimize": (MODEL, "--data", "loose", "--out", "fast", "--images", "2"),
    "show": (MODEL, "pictures/cat/0.png", "--out", "shown.png"),
    "explore": (MODEL, "pictures/cat/0.png"),
    "train": (MODEL, "--data", "pictures", "--out", "run", "--epochs", "1", "--batch", "2", "--workers", "0"),
    "distill": (MODEL, "--data", "pictures", "--out", "run", "--attention", "foveal", "--epochs", "1", "--batch", "2"),
    "compare": (MODEL, "--data", "pictures", "--out", "contest", "--attention", "full", "--jobs", "1", "--batch", "2"),
    "recipes": (),
    "demo": ("--out", "demo", "--jobs", "1"),
    "check": ("full",),
    "list": (),
    "papers": (),
    "doctor": (),
}
DETECTION = ("--task", "detection")


@dataclasses.dataclass(frozen=True)
class Bad:
    """A mistake: what the error must name, the command, and the words that make the mistake.

    `model` replaces MODEL, `spec` the attention, `pictures` the images; the other words follow the sound ones.
    """

    name: str
    says: str
    command: str
    words: tuple[str, ...] = ()
    model: str | None = None
    spec: str | None = None
    pictures: str | None = None

    def given(self) -> list[str]:
        sound = list(SOUND[self.command])
        if self.model is not None:
            sound[0] = self.model
        if self.pictures is not None:
            sound[1] = self.pictures
        if self.spec is not None and self.command == "check":
            sound[0] = self.spec
        elif self.spec is not None:
            sound += ["--attention", self.spec]
        return [self.command, *sound, *self.words]


def word(name: str, says: str, command: str, *words: str) -> Bad:
    return Bad(name, says, command, words)


def model(name: str, given: str, says: str, command: str = "info") -> Bad:
    return Bad(name, says, command, model=given)


def spec(name: str, given: str, says: str, command: str = "info") -> Bad:
    return Bad(name, says, command, spec=given)


def weights(name: str, given: str, says: str) -> Bad:
    return Bad(f"weights {name}", says, "info", ("--weights", given))


def data(name: str, given: str, says: str, command: str = "eval") -> Bad:
    return Bad(f"data {name}", says, command, ("--data", given))


TABLE = [
    # MODEL
    model("model unknown", "nothing_like_it", "unknown model 'nothing_like_it'"),
    model("model misspelt", "deit_tiny_patch16_225", "Did you mean 'deit_tiny_patch16_224'"),
    model("model empty", "", "unknown model ''"),
    model("model in other letters", "视觉", "unknown model '视觉'"),
    model("model very long", "m" * 5000, "File name too long|unknown model"),
    model("model file missing", "none.safetensors", "none.safetensors"),
    model("model file empty", "empty.safetensors", "empty.safetensors"),
    model("model file cut", "cut.safetensors", "cut.safetensors"),
    model("model file garbage", "garbage.safetensors", "garbage.safetensors"),
    model("model file with a flipped bit", "flipped.safetensors", "does not match its digest"),
    model("model file of weights alone", "weights.safetensors", "does not say of which model"),
    model("model file that is text", "notes.txt", "notes.txt"),
    model("model folder of something else", "pictures", "pictures"),
    model("model that cannot be converted", "resnet10t", "resnet10t|ResNet", "convert"),
    # attentions
    spec("attention unknown", "nothing", "unknown attention 'nothing'"),
    spec("attention misspelt", "fovael", "Did you mean 'foveal'"),
    spec("attention empty", "", "attention"),
    spec("attention in other letters", "注意", "attention"),
    spec("attention very long", "foveal:keep=" + "9" * 5000, "keep"),
    spec("attention of many layers", "/".join(["full"] * 500), "500|read"),
    spec("option unknown", "foveal:kep=0.1", "Did you mean 'keep'"),
    spec("option twice", "foveal:keep=0.1,keep=0.2", "given twice"),
    spec("option out of range", "foveal:keep=7", "out of range"),
    spec("option negative", "foveal:keep=-1", "out of range"),
    spec("option NaN", "foveal:keep=nan", "keep"),
    spec("option in other digits", "foveal:keep=٠.٥", "cannot be read"),
    spec("option with an underscore", "window:size=1_0", "cannot be read"),
    spec("option of another type", "foveal:keep=much", "cannot be read"),
    spec("attention for too many layers", "99xfull", "99|read"),
    spec("attention without a keep to tune", "full", "no keep option", "tune"),
    # sizes
    *(
        word(f"size {size}", "size", "info", "--size", size)
        for size in ("0", "-1", "1000000000", "384x", "x", "1e3", "²", "32x32x32", "nan", "")
    ),
    word("size beyond reason", "'1000000' is too large: expected at most 65,536", "info", "--size", "1000000"),
    word("size no multiple of the patch", "33", "info", "--size", "33"),
    # numbers
    word("batch in other digits", "'٣': expected a whole number", "train", "--batch", "٣"),
    word("budget in other digits", "'٣': expected a number", "bench", "--budget", "٣"),
    word("field in other digits", "cannot be read", "train", "--set", "lr=٣"),
    word("layers in other digits", "cannot be read", "convert", "--layers", "٠", "--out", "x.safetensors"),
    word("pixel in other digits", "expected X,Y", "show", "--query", "٣,٣"),
    word("workers beyond reason", "expected a whole number from 0 to", "train", "--workers", "100000"),
    word("threads beyond reason", "expected a whole number from 1 to", "train", "--threads", "1000000"),
    word("jobs beyond reason", "expected a whole number from 1 to", "compare", "--jobs", "100000"),
    word("comparison without training", "epochs=0: a comparison trains", "compare", "--epochs", "0"),
    # weights
    weights("missing", "none.safetensors", "none.safetensors"),
    weights("empty", "empty.safetensors", "empty.safetensors"),
    weights("cut", "cut.safetensors", "cut.safetensors"),
    weights("garbage", "garbage.safetensors", "garbage.safetensors"),
    weights("that would run code", "evil.pt", "evil.pt"),
    weights("NaN", "nan.safetensors", "holds NaN or infinity"),
    weights("infinite", "infinite.safetensors", "holds NaN or infinity"),
    weights("of another model", "other.safetensors", "do not fit the model"),
    weights("without tensors", "hollow.safetensors", "do not fit the model"),
    weights("a folder", "pictures", "pictures"),
    weights("no name", "", "weights"),
    weights("text", "notes.txt", "notes.txt"),
    # data
    data("missing", "nowhere", "nowhere"),
    data("empty name", "", "data"),
    data("empty folder", "nothing", "no images"),
    data("a file", "notes.txt", "is a file"),
    data("broken pictures", "broken", "read", "train"),
    data("pictures of no bytes", "hollow", "read", "train"),
    data("broken pictures without labels", "broken/cat", "read", "eval"),
    data("pictures of no bytes without labels", "hollow/a", "read", "eval"),
    data("an empty class", "half", "contains no images", "eval"),
    data("too few pictures to judge by", "half", "at least 6", "tune"),
    data("unknown torchvision set", "Nothing@pictures", "Nothing"),
    data("without labels", "loose", "without labels", "train"),
    # token reducers
    word("tokens unknown", "unknown token reducer 'tom'. Did you mean 'tome'", "info", "--tokens", "tom:r=3"),
    word("tokens without such an option", "unknown option of tome 'rr'", "info", "--tokens", "tome:rr=3"),
    word("tokens out of range", "out of range", "info", "--tokens", "evit:keep=2"),
    word("tokens no number", "cannot be read", "info", "--tokens", "tome:r=many"),
    word("tokens in a layer that is not there", "there is no layer", "info", "--tokens", "evit:at=77"),
    word("tokens for other layers", "expected 1, 2 or", "info", "--tokens", "tome:r=1/2/3/4/5/6/7"),
    # exporting and runtimes
    word("out of no format", "expected a name that ends in .onnx or .xml or .pt2", "export", "--out", "fast.h5"),
    word("out of another format", "ends in .onnx (onnx)", "export", "--format", "onnx"),
    word("format unknown", "unknown value 'tflite'. There are: onnx, ", "export", "--format", "tflite"),
    word("out somebody's export", "--force", "export", "--out", "somebodys.onnx"),
    word("dynamic unknown", "unknown value 'size'", "export", "--dynamic", "size"),
    word("int8 without images", "--data", "export", "--int8", "--out", "fast.onnx"),
    word("int8 for pt2", "pt2 has no int8", "export", "--int8", "--data", "loose"),
    *(word(f"opset {n}", "opset", "export", "--opset", n, "--out", "fast.onnx") for n in ("0", "x", "7", "99")),
    word("opset for pt2", "opset", "export", "--opset", "18"),
    *(word(f"exporting from data {n}", n, "export", "--data", n) for n in ("nowhere", "nothing", "notes.txt")),
    word("exporting from broken pictures", "read", "export", "--data", "broken"),
    word("runtime unknown", "unknown runtime 'onx'. Did you mean 'onnx'", "bench", "--runtime", "eager", "onx"),
    # files to write
    word("json a folder", "is a folder", "list", "--json", "pictures"),
    word("json under a file", "is not a folder", "list", "--json", "notes.txt/x.json"),
    word("json somebody's file", "--force", "list", "--json", "notes.txt"),
    word("json where nothing can be", "/proc", "list", "--json", "/proc/none/x.json"),
    word("json without a name", "expected the name of a file", "list", "--json", ""),
    word("json into the plug-in", "reads", "list", "--plugin", "sound_plugin.py", "--force", "--json",
         "sound_plugin.py"),
    word("out over the weights", "reads", "convert", "--weights", "weights.safetensors", "--out",
         "weights.safetensors", "--force"),
    word("out without an ending", ".safetensors", "convert", "--out", "model"),
    word("out somebody's file", "--force", "convert", "--out", "weights.safetensors"),
    word("out and json the same", "is also the file of", "convert", "--out", "a.safetensors", "--json",
         "a.safetensors"),
    word("out a file", "notes.txt", "demo", "--out", "notes.txt"),
    word("out under a file", "notes.txt", "train", "--out", "notes.txt/run"),
    word("plot of unknown kind", ".png", "bench", "--plot", "curve.gif"),
    # plug-ins
    word("plug-in missing", "none.py", "list", "--plugin", "none.py"),
    word("plug-in a folder", "is not a file", "list", "--plugin", "pictures"),
    word("plug-in that raises", "ZeroDivisionError", "list", "--plugin", "raising.py"),
    word("plug-in that leaves", "SystemExit", "list", "--plugin", "leaving.py"),
    word("plug-in that is no Python", "SyntaxError", "list", "--plugin", "wrong.py"),
    word("plug-in with another ending", "is not a Python file", "list", "--plugin", "notes.txt"),
    # numbers
    *(word(f"threads {n}", "--threads", "eval", "--threads", n) for n in ("0", "-1", "many", "9" * 5000)),
    *(word(f"batch {n}", "batch", "bench", "--batch", n) for n in ("0", "-1", "1.5", "")),
    word("batch that no memory holds", "expected a batch of at most", "bench", "--batch", "100000000"),
    word("batch without pictures enough", "batch|few", "train", "--batch", "100000000"),
    *(word(f"budget {n}", "budget", "bench", "--budget", n) for n in ("0", "-1", "nan", "inf", "x")),
    *(word(f"crop {n}", "crop", "eval", "--crop-pct", n) for n in ("0", "2", "nan", "-1", "x")),
    *(word(f"images {n}", "--images", "eval", "--images", n) for n in ("0", "-1", "x")),
    *(word(f"images to search by {n}", "--images", "tune", "--images", n) for n in ("0", "x")),
    *(word(f"workers {n}", "workers", "eval", "--workers", n) for n in ("-5", "x")),
    *(word(f"seed {n}", "seed", "bench", "--seed", n) for n in ("-1", "x", "1e3")),
    *(word(f"seeds {n}", "seed", "compare", "--seed", "1", n) for n in ("-1", "x")),
    *(word(f"max-drop {n}", "drop", "tune", "--max-drop", n) for n in ("nan", "-1", "x", "inf")),
    *(word(f"target-ms {n}", "target", "tune", "--target-ms", n) for n in ("nan", "-1", "0", "x", "inf")),
    *(word(f"rates {n}", "rates|keep", "tune", "--rates", n) for n in ("2", "-1", "nan", "x")),
    word("both bounds", "--target-ms", "tune", "--max-drop", "1", "--target-ms", "5"),
    *(word(f"epochs {n}", "epochs", "train", "--epochs", n) for n in ("-1", "x", "nan")),
    *(word(f"lr {n}", "lr", "train", "--set", f"lr={n}") for n in ("-1", "x", "nan", "inf")),
    *(word(f"patch {n}", "patch", "compare", "--patch", n) for n in ("0", "5", "x")),
    *(word(f"larger {n}", "larger", "compare", "--larger", n) for n in ("0", "x")),
    *(word(f"topk {n}", "--topk", "predict", "--topk", n) for n in ("0", "-1", "x")),
    *(word(f"shard {n}", "--shard", "predict", "--shard", n) for n in ("0", "x")),
    *(word(f"port {n}", "--port", "serve", "--port", n) for n in ("-1", "65536", "http")),
    *(word(f"wait-ms {n}", "--wait-ms", "serve", "--wait-ms", n) for n in ("-1", "nan", "x")),
    *(word(f"max-mb {n}", "--max-mb", "serve", "--max-mb", n) for n in ("0", "-1", "inf", "x")),
    *(word(f"max-megapixels {n}", "--max-megapixels", "serve", "--max-megapixels", n) for n in ("0", "x")),
    *(word(f"queue {n}", "--queue", "serve", "--queue", n) for n in ("0", "x")),
    *(word(f"processes {n}", "--workers", "serve", "--workers", n) for n in ("0", "x")),
    # pictures to predict, and where their answers go
    Bad("picture missing", "'none.jpg': no such image or folder", "predict", model=MODEL, pictures="none.jpg"),
    Bad("picture without a name", "no such image|no images", "predict", pictures="nothing"),
    word("answers into a file", "notes.txt", "predict", "--out", "notes.txt"),
    word("answers among somebody's files", "`predict` did not write", "predict", "--out", "pictures"),
    word("answers twice", "give one of the two", "predict", "--out", "answers", "--json", "answers.json"),
    word("cluster without a folder", "--ray needs --out", "predict", "--ray", "local"),
    word("runtime to predict with unknown", "unknown runtime 'onyx'", "predict", "--runtime", "onyx"),
    word("runtime of another file", "is not an exported file", "predict", "--runtime", "onnx"),
    model("exported file missing", "none.onnx", "'none.onnx': no such file", "predict"),
    word("address that is not ours", "cannot listen at 192.0.2.1", "serve", "--host", "192.0.2.1"),
    # words
    word("layers backwards", "layers", "convert", "--layers", "5-2"),
    word("layers nonsense", "layers", "convert", "--layers", "first"),
    word("layers that are not there", "layer", "convert", "--layers", "99"),
    word("below-breakeven", "--below-breakeven", "bench", "--below-breakeven", "maybe"),
    word("predictor missing", "none.safetensors", "convert", "--predictor",
         "none.safetensors", "--attention", "sparsifiner"),
    word("predictor that is none", "is not a predictor", "convert", "--predictor",
         "weights.safetensors", "--attention", "sparsifiner"),
    word("predictor of another model", "layers", "convert", "--predictor",
         "deit_tiny_patch16_224", "--attention", "sparsifiner"),
    word("recipe unknown", "qick", "train", "--recipe", "qick"),
    word("recipe field unknown", "epoch", "train", "--recipe", "quick:epoch=1"),
    word("recipe value unreadable", "epochs", "train", "--recipe", "quick:epochs=x"),
    word("phase unknown", "nothing", "distill", "--phase", "nothing:epochs=1"),
    word("phase field unknown", "nothing", "distill", "--phase", "all:nothing=1"),
    word("optimizer unknown", "nothing", "train", "--set", "optimizer=nothing"),
    word("precision unknown", "precision", "train", "--set", "precision=fp1"),
    word("device unknown", "device", "train", "--set", "device=abacus"),
    word("option that does not exist", "--nonsense", "list", "--nonsense"),
    word("option without its value", "--json", "list", "--json"),
    word("one word too many", "unrecognized arguments", "list", "--force", "too", "many"),
    model("model of show without attention", "resnet10t", "no attention of attendless", "show"),
    word("weights of show damaged", "cut.safetensors", "show", "--weights", "cut.safetensors"),
    word("picture of unknown kind", ".png", "show", "--out", "shown.gif"),
    word("picture over somebody's file", "--force", "show", "--out", "pictures/cat/1.png"),
    word("picture over the one it shows", "reads", "show", "--out", "pictures/cat/0.png", "--force"),
    word("figure unknown", "unknown value 'mona-lisa'", "show", "--figure", "mona-lisa"),
    *(word(f"query {n}", "query", "show", "--query", n) for n in ("1", "x,y", "1,2,3", "99,1", "-1,1", "nan,nan")),
    *(word(f"layer {n}", "layer", "show", "--layers", n) for n in ("99", "-99", "x")),
    *(word(f"head {n}", "head", "show", "--heads", n) for n in ("99", "-1", "x")),
    word("attention of explore unknown", "unknown attention 'nothing'", "explore", "--attention", "full", "nothing"),
    Bad("picture of explore missing", "cannot read image", "explore", pictures="none.jpg"),
    Bad("picture of explore that is none", "cannot read image", "explore", pictures="notes.txt"),
    *(word(f"port of explore {n}", "port", "explore", "--port", n) for n in ("0", "-1", "x", "70000")),
    word("host that is elsewhere", "cannot serve at 203.0.113.7", "explore", "--host", "203.0.113.7"),
    word("table unknown", "unknown table 'lavit-99'", "papers", "lavit-99"),
    word("name unknown", "unknown attention 'nothing'", "list", "nothing"),
    # detection and segmentation
    word("task unknown", "unknown value 'segmentatoin'. Did you mean 'segmentation'", "eval", "--task", "segmentatoin"),
    Bad("task of a classifier", "holds a classifier", "eval", DETECTION, model="saved.safetensors"),
    word("task of a bare model", "expected a file that `attendless train --task` wrote", "eval", *DETECTION),
    word("several scales of a class", "is for segmentation", "eval", "--several-scales"),
    word("head unknown", "unknown head 'retina'. Did you mean 'retinanet'", "train", *DETECTION, "--head", "retina"),
    word("head of another task", "is for segmentation, not for detection", "train", *DETECTION, "--head", "upernet"),
    word("head without a task", "is for --task detection or segmentation", "train", "--head", "retinanet"),
    word("head with an unknown option", "unknown option of head retinanet 'width'", "train", *DETECTION, "--head",
         "retinanet:width=3"),
    word("recipe of another task", "unknown recipe of detection 'quick'", "train", *DETECTION, "--recipe", "quick"),
    word("field of another task", "field of a detection recipe 'mixup'", "train", *DETECTION, "--set", "mixup=1"),
    word("dense field of a class", "unknown field of a classification recipe 'scales'", "train", "--set", "scales=320"),
    word("no annotations", "no annotations in 'pictures'", "train", *DETECTION),
    word("annotations that are none", "is not COCO's JSON", "train", *DETECTION, "--data", "untrue"),
    word("no masks", "no masks in 'pictures'", "train", "--task", "segmentation"),
    word("masks of one class", "contain 1 class", "train", "--task", "segmentation", "--data", "blank"),
]  # fmt: skip


class Evil:
    """Unpickled, it would leave a mark."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("hacked",)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything the table names."""
    root = tmp_path_factory.mktemp("world")
    micro = timm.create_model(MODEL)
    sound = micro.state_dict()
    attendless.save(micro, root / "saved.safetensors")
    saved = (root / "saved.safetensors").read_bytes()
    (root / "empty.safetensors").write_bytes(b"")
    (root / "cut.safetensors").write_bytes(saved[: len(saved) // 2])
    (root / "garbage.safetensors").write_bytes(os.urandom(5000))
    (root / "flipped.safetensors").write_bytes(saved[:-5] + bytes([saved[-5] ^ 1]) + saved[-4:])
    save_file(sound, root / "weights.safetensors")
    save_file({}, root / "hollow.safetensors")
    first = next(iter(sound))
    for name, value in (("nan", float("nan")), ("infinite", float("inf"))):
        save_file({**sound, first: torch.full_like(sound[first], value)}, root / f"{name}.safetensors")
    save_file(timm.create_model("resnet10t").state_dict(), root / "other.safetensors")
    (root / "evil.pt").write_bytes(pickle.dumps(Evil()))
    (root / "notes.txt").write_text("somebody's notes")
    (root / "somebodys.onnx").write_bytes(b"a graph of somebody's")
    (root / "sound_plugin.py").write_text("")
    (root / "raising.py").write_text("1 / 0\n")
    (root / "leaving.py").write_text("raise SystemExit(0)\n")
    (root / "wrong.py").write_text("not python at all\n")
    for number in range(6):
        for folder in ("pictures/cat", "pictures/dog", "half/cat", "loose"):
            (root / folder).mkdir(parents=True, exist_ok=True)
            for name in (f"{number}.png", f"{number}.bmp"):
                Image.new("RGB", (40, 40), (40 * number, 0, 0)).save(root / folder / name)
        contents = {"broken/cat": b"no picture", "broken/dog": b"\x89PNG", "hollow/a": b"", "hollow/b": b""}
        for folder, content in contents.items():
            (root / folder).mkdir(parents=True, exist_ok=True)
            (root / folder / f"{number}.png").write_bytes(content)
        for folder in ("blank/images", "blank/masks"):
            (root / folder).mkdir(parents=True, exist_ok=True)
            for name in ("a", "b"):
                Image.new("L" if "masks" in folder else "RGB", (40, 40)).save(root / folder / f"{name}{number}.png")
    (root / "untrue").mkdir()
    (root / "untrue" / "instances.json").write_text("[1, 2")
    (root / "half" / "dog").mkdir()
    (root / "nothing").mkdir()
    return root


def snapshot(root: Path) -> dict[str, tuple]:
    """Name → when it was changed, and what it holds."""
    return {
        str(path.relative_to(root)): (
            path.stat().st_mtime_ns if path.is_file() else None,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted(root.rglob("*"))
    }


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


#: Shared arguments, and the commands that have them: all go through the same parser, checks of files, plug-ins and
#: error path. `serve` opens its model as `predict` does, but in worker processes that take seconds to start.
HAVING = {
    "model": (
        "info",
        "convert",
        "bench",
        "eval",
        "predict",
        "show",
        "explore",
        "tune",
        "optimize",
        "export",
        "train",
        "distill",
    ),
    "--attention": (
        "info",
        "convert",
        "bench",
        "eval",
        "predict",
        "export",
        "show",
        "train",
        "distill",
        "compare",
        "tune",
        "optimize",
    ),
    "--data": ("eval", "tune", "optimize", "train", "distill", "compare", "export"),
}


def wiring(command: str) -> list[Bad]:
    found = [
        word("flag", "unrecognized flag '--nonsense'", command, "--nonsense"),
        word("value", "--json", command, "--json"),
        word("target", "is a folder", command, "--json", "pictures"),
        word("plug-in", "ZeroDivisionError", command, "--plugin", "raising.py"),
    ]
    if command not in ("compare", "check", "predict"):
        found.append(word("too many", "unrecognized arguments", command, "--force", "too", "many"))
    if command in (*HAVING["model"], "compare"):
        found.append(model("model", "nothing_like_it", "unknown model 'nothing_like_it'", command))
        found.append(word("size", "33|size", command, "--size", "33"))
    if command in HAVING["model"]:
        found.append(word("weights", "cut.safetensors", command, "--weights", "cut.safetensors"))
    if command in (*HAVING["--attention"], "explore", "check"):
        found.append(spec("attention", "nothing", "unknown attention 'nothing'", command))
    if command in HAVING["--attention"] and command not in ("compare",):
        found.append(word("tokens", "unknown token reducer 'tom'", command, "--tokens", "tom:r=3"))
    if command in HAVING["--data"]:
        found.append(word("data", "nowhere", command, "--data", "nowhere"))
    if command in ("train", "distill", "compare"):
        found.append(word("recipe", "unknown", command, "--recipe", "qick"))
        found.append(word("field", "unknown field of a classification recipe 'nothing'", command, "--set", "nothing=1"))
        found.append(word("out", "notes.txt", command, "--out", "notes.txt"))
    return found


def answer(bad: Bad, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Give the mistake, and check how it is answered."""
    before = snapshot(world)
    with pytest.raises(SystemExit) as stop:
        main(bad.given())
    printed = capsys.readouterr()
    assert stop.value.code == 2
    assert printed.err.startswith("attendless: error: ")
    assert printed.err.count("\n") == 1, printed.err
    assert len(printed.err) < 1500
    assert any(text in printed.err for text in bad.says.split("|")), printed.err
    assert snapshot(world) == before


@pytest.mark.parametrize("bad", TABLE, ids=[f"{bad.command}: {bad.name[:40]}" for bad in TABLE])
def test_a_mistake_is_answered_in_one_line(
    bad: Bad, world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(world)
    answer(bad, world, capsys)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_reports_mistakes_the_same_way(
    command: str, world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(world)
    for bad in wiring(command):
        answer(bad, world, capsys)


def test_the_wiring_covers_every_command_that_has_the_argument() -> None:
    """A command that gains MODEL, --attention or --data must be named in `HAVING`."""
    found: dict[str, set[str]] = {name: set() for name in HAVING}
    for command in COMMANDS:
        parser = Parser()
        importlib.import_module(f"attendless_cli.{command}").add_arguments(parser)
        for action in parser._actions:
            for name in {action.dest, *action.option_strings} & found.keys():
                found[name].add(command)
    assert found["model"] == {*HAVING["model"], "compare", "serve"}
    assert found["--attention"] == {*HAVING["--attention"], "explore", "serve"}
    assert found["--data"] == {*HAVING["--data"], "convert", "papers"}


def test_the_table_is_as_large_as_promised() -> None:
    assert len({bad.name for bad in TABLE}) == len(TABLE) >= 200
