"""`attendless COMMAND …`: finds the command's file, parses its words, and turns users' mistakes into one clear line.

A command is a module of this package with a docstring (its help, ending in examples), `add_arguments(parser)` and
`run(args)`, which returns an exit code or nothing. Only the command asked for is imported, and torch only once it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

#: Every command with its one-line help, in the order a newcomer meets them.
COMMANDS = {
    "demo": "the first ten minutes: a model converted, attentions compared, one report, on data that comes with it",
    "info": "what a model costs: layers, parameters, MACs, and how much attending less can gain",
    "convert": "put another attention into a pretrained model, or merge its tokens, without training",
    "bench": "measure speed and memory against the dense model, on this machine",
    "eval": "measure accuracy, and agreement with the dense model, on a folder of images",
    "predict": "say what is in pictures, from a model or an exported file, here or on a cluster",
    "serve": "answer over HTTP what is in a picture, in batches",
    "show": "draw what a model looks at in a picture",
    "explore": "look at a model's attention in the browser, patch by patch",
    "tune": "search what to merge and attend with in each layer: answers kept, milliseconds saved",
    "export": "write a model for ONNX Runtime, OpenVINO or torch.export, checked against PyTorch",
    "train": "train a model",
    "distill": "teach a model that attends less, or has fewer tokens, to answer as its teacher does",
    "compare": "train and measure attentions under identical conditions, with a report",
    "check": "run the contract that every attention keeps on any attention, yours too",
    "list": "the attentions, token reducers and models that exist",
    "papers": "the papers' tables, counted again",
    "doctor": "what this installation and this machine can do",
}

#: What people ask first, the command that answers, and how long it takes.
FIRST = (
    ("what is this?", "demo", "ten minutes: a model converted, attentions compared, one report"),
    ("what is there to gain?", "info deit_tiny_patch16_224 --size 224 384 1024", "seconds: costs, and the cap"),
    (
        "what does the clock say here?",
        "bench deit_tiny_patch16_224 --attention foveal:keep=0.1 --size 384",
        "a minute: milliseconds and memory, by turns with timm's own model",
    ),
    (
        "how do I get the faster model?",
        "convert deit_tiny_patch16_224 --weights W --attention foveal:keep=0.1 --size 384 --out fast.safetensors",
        "seconds: no training; layer by layer, what was done and why",
    ),
    (
        "are its answers the same?",
        "eval fast.safetensors --data DIR --attention full foveal:keep=0.1",
        "minutes: accuracy and agreement, picture by picture, with intervals",
    ),
)

#: How PyTorch says it, for the CPU, Windows, CUDA, and a size no machine has.
_NO_MEMORY = "can't allocate memory|not enough memory|out of memory|Storage size calculation overflowed"


class Parser(argparse.ArgumentParser):
    """argparse, with mistakes answered on one line."""

    def error(self, message: str) -> NoReturn:
        fail(f"{message} (see {self.prog} --help)")


class Command(Parser):
    """A command's own words, read from its file once that command is asked for."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        module = importlib.import_module(f"{__package__}.{self.prog.split()[-1]}")
        self.description = module.__doc__
        module.add_arguments(self)
        _plugin(self, "plugin_of_command")
        self.set_defaults(run_command=module.run)
        return super().parse_known_args(args, namespace)


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=min(120, _columns()))


def fail(message: str) -> NoReturn:
    line = " ".join(message.split())
    if len(line) > 1000:  # whatever was given is repeated in it, and may be of any length
        line = f"{line[:600]} … {line[-300:]}"
    print(f"attendless: error: {line}", file=sys.stderr)
    raise SystemExit(2)


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """The console script."""
    raise SystemExit(main(sys.argv[1:] if argv is None else list(argv)))


def main(argv: Sequence[str]) -> int:
    try:
        with _leaving_at_once():
            args = _parser().parse_args(argv)
            if args.version or args.command is None:
                return _answer(args)
            import attendless  # noqa: F401 (seconds, in which Ctrl-C is heard)
        return _run(args)
    except KeyboardInterrupt:
        return _stopped()


def _parser() -> Parser:
    parser = Parser(
        prog="attendless",
        description="Vision Transformers that attend less, and are measurably faster for it.",
        epilog="start with:      attendless info deit_tiny_patch16_224 --size 224 384\n"
        "help on a command:  attendless COMMAND --help\n\n"
        "exit codes:      0 done · 1 a check, a run or an image failed · 2 a mistake in what was given, or no room on\n"
        "                 disk or in memory · 130 stopped",
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    _plugin(parser, "plugin")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=Command)
    for name, line in COMMANDS.items():
        commands.add_parser(name, help=line, formatter_class=_Help)
    return parser


def _plugin(parser: argparse.ArgumentParser, name: str) -> None:
    """`--plugin`, before the command or after it."""
    text = "a Python file that registers attentions or backends; may be repeated"
    parser.add_argument("--plugin", dest=name, action="append", default=[], metavar="FILE", help=text)


def _answer(args: argparse.Namespace) -> int:
    """What is asked without a command."""
    if args.version:
        from importlib.metadata import version

        print(f"attendless {version('attendless')}")
    else:
        print("Vision Transformers that attend less, and are measurably faster for it.\n")
        for question, command, answer in FIRST:
            print(f"{question}\n  attendless {command}\n  {answer}\n")
        print("Every command: attendless --help")
    return 0


def _run(args: argparse.Namespace) -> int:
    from attendless.errors import UserError
    from attendless.plugins import load_plugin

    from . import targets

    try:
        targets.check(args)
        aside = contextlib.redirect_stdout(sys.stderr) if targets.to_standard_output(args) else contextlib.nullcontext()
        with aside:
            for plugin in (*args.plugin, *args.plugin_of_command):
                load_plugin(plugin)
            code = args.run_command(args) or 0
            sys.stdout.flush()
            return code
    except UserError as error:
        fail(_own_words(str(error)))
    except BrokenPipeError:  # the reader (head, less) has gone; there is nobody left to tell
        _drop_output()
        return 0
    except OSError as error:
        _drop_output()
        fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error))
    except (MemoryError, RuntimeError) as error:
        wanted = _memory(error)
        if wanted is None:
            raise
        fail(f"not enough memory{wanted}: give a smaller --batch or --size, or a smaller model")


def _drop_output() -> None:
    """Throw away what standard output did not take, which Python would try to write once more at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _memory(error: Exception) -> str | None:
    """How much memory was asked for in vain, as far as it is told; None if this error is about something else."""
    text = str(error)
    if not isinstance(error, MemoryError) and not re.search(_NO_MEMORY, text):
        return None
    found = re.search(r"allocate (\d+) bytes", text)
    return f" for {int(found[1]) / 1e9:,.1f} GB at once" if found else ""


@contextlib.contextmanager
def _leaving_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process. Raised in the middle of an import, it could be lost or end in a traceback."""
    listening = threading.current_thread() is threading.main_thread()
    if not listening or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # someone else listens
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(_stopped()))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _own_words(message: str) -> str:
    """The error itself: out of a process that prepares images, PyTorch hands it on with that process's traceback."""
    return message.rpartition("UserError: ")[2] if "Original Traceback" in message else message


def _stopped() -> int:
    with contextlib.suppress(OSError):
        os.write(2, b"attendless: stopped\n")  # a signal may come in the middle of a print, which cannot begin another
    return 130


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size((100, 24)).columns
