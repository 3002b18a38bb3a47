"""`attendless COMMAND …`: parses the command line, runs the command and reports users' mistakes on one line.

Only the module of the command that was given is imported, and torch only when that command runs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import NoReturn

from .parser import Command, Parser, add_plugin, fail

#: Every command with its one-line help, in the order in which a new user needs them.
COMMANDS = {
    "demo": "a first tour in ten minutes: convert a model, compare attentions, one report; data included",
    "info": "print the cost of a model: layers, parameters, MACs, and the maximum speed-up of sparser attention",
    "convert": "replace the attention of a pretrained model, or merge its tokens, without training",
    "bench": "measure latency, throughput and memory against the original model on this machine",
    "eval": "measure accuracy, and agreement with the original model, on a folder of images",
    "predict": "classify images with a model or an exported file, on this machine or a Ray cluster",
    "serve": "classify images over HTTP, with dynamic batching",
    "show": "draw attention maps and other figures of a model for one image",
    "explore": "inspect a model's attention in the browser, patch by patch",
    "optimize": "search, export and verify the fastest file within an accuracy drop, in one command",
    "tune": "search the attention and token merging of each layer: lower latency, same predictions",
    "export": "write a model for ONNX Runtime, OpenVINO or torch.export, and compare it with PyTorch",
    "train": "train a model",
    "distill": "train a model with sparser attention or reduced tokens to reproduce its teacher",
    "compare": "train and measure attentions under identical conditions, with a report",
    "recipes": "list the recipes of train, distill and compare, and every field that --set takes",
    "check": "test whether an attention or token reducer, also your own, follows its interface",
    "list": "list the attentions, token reducers and models",
    "papers": "recompute the tables of the papers",
    "doctor": "report what this installation and this machine support",
}

#: Questions of a new user, each with a command and its duration.
FIRST = (
    ("What is this?", "demo", "ten minutes: converts a model, compares attentions, writes one report"),
    ("How much can I gain?", "info deit_tiny_patch16_224 --size 224 384 1024", "seconds: costs and maximum speed-up"),
    (
        "How fast is it on this machine?",
        "bench deit_tiny_patch16_224 --attention foveal:keep=0.1 --size 384",
        "a minute: latency and memory, interleaved with timm's own model",
    ),
    (
        "How do I get the faster model?",
        "convert deit_tiny_patch16_224 --weights W --attention foveal:keep=0.1 --size 384 --out fast.safetensors",
        "seconds: no training; reports what was done in each layer and why",
    ),
    (
        "Does it make the same predictions?",
        "eval fast.safetensors --data DIR --attention full foveal:keep=0.1",
        "minutes: accuracy and agreement, paired per image, with confidence intervals",
    ),
)

#: How PyTorch reports it on the CPU, on Windows, on CUDA, and for a size that no machine has.
_NO_MEMORY = "can't allocate memory|not enough memory|out of memory|Storage size calculation overflowed"


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """The console script."""
    raise SystemExit(main(sys.argv[1:] if argv is None else list(argv)))


def main(argv: Sequence[str]) -> int:
    _print_any_name()
    try:
        os.getcwd()
    except FileNotFoundError:  # libraries of torch would end the process without a reason
        fail("the working directory has been deleted: change to one that exists (cd)")
    try:
        with _leaving_at_once():
            args = _parser().parse_args(argv)
            if args.version or args.command is None:
                return _without_command(args)
            import attendless  # noqa: F401 (takes seconds, which Ctrl-C may interrupt)
        with _cleaning_up():
            return _run(args)
    except KeyboardInterrupt:
        return _stopped()


def _print_any_name() -> None:
    """Let names of files that are not text be printed with escapes, in place of an error after all the work."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _parser() -> Parser:
    parser = Parser(
        prog="attendless",
        description="Make pretrained Vision Transformers faster on CPUs, without retraining.",
        epilog="start with:      attendless info deit_tiny_patch16_224 --size 224 384\n"
        "help on a command:  attendless COMMAND --help\n\n"
        "exit codes:      0 success · 1 a check, a run or an image failed · 2 wrong arguments or input, disk full or\n"
        "                 out of memory · 130 interrupted",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    add_plugin(parser, "plugin")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=Command)
    for name, line in COMMANDS.items():
        commands.add_parser(name, help=line)
    return parser


def _without_command(args: argparse.Namespace) -> int:
    """Print the version, or the first steps."""
    if args.version:
        from importlib.metadata import version

        print(f"attendless {version('attendless')}")
    else:
        print("Make pretrained Vision Transformers faster on CPUs, without retraining.\n")
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
        fail(_message_alone(str(error)))
    except BrokenPipeError:  # the reader (head, less) has closed the pipe
        _drop_output()
        return 0
    except OSError as error:
        _drop_output()
        fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error))
    except (MemoryError, RuntimeError) as error:
        amount = _memory(error)
        if amount is None:
            raise
        fail(f"not enough memory{amount}: give a smaller --batch or --size, or a smaller model")


def _drop_output() -> None:
    """Discard what standard output did not accept, because Python would try to write it again when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _memory(error: Exception) -> str | None:
    """How much memory could not be allocated, if the error states it; None if the error has another cause."""
    text = str(error)
    if not isinstance(error, MemoryError) and not re.search(_NO_MEMORY, text):
        return None
    found = re.search(r"allocate (\d+) bytes", text)
    return f" for {int(found[1]) / 1e9:,.1f} GB at once" if found else ""


@contextlib.contextmanager
def _cleaning_up() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does, so that temporary files go. Commands with a handler of their own
    (`serve`, `train`) install it later."""
    listening = threading.current_thread() is threading.main_thread()
    if not listening or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    process = os.getpid()

    def stop(number: int, frame: object) -> None:
        if os.getpid() != process:  # a forked worker, whose files are not its own
            os._exit(130)
        signal.signal(number, signal.SIG_IGN)  # a second one would interrupt the cleaning
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def _leaving_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process: a KeyboardInterrupt during an import could be lost or print a traceback."""
    listening = threading.current_thread() is threading.main_thread()
    if not listening or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # another handler is installed
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(_stopped()))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _message_alone(message: str) -> str:
    """The message itself: PyTorch adds the traceback of the worker process to an error raised there."""
    return message.rpartition("UserError: ")[2] if "Original Traceback" in message else message


def _stopped() -> int:
    with contextlib.suppress(OSError):
        os.write(2, b"attendless: stopped\n")  # a signal may arrive during a print, which cannot start another
    return 130
