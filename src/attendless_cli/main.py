"""`attendless VERB …`: finds the verb's file, parses its words, and turns users' mistakes into one clear line.

A verb is a module of this package with a docstring (its help, ending in examples), `arguments(parser)` and
`run(args)`, which returns an exit code or nothing. Only the verb asked for is imported, and torch only once it runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

#: Every verb with its one-line help, in the order a newcomer meets them.
VERBS = {
    "info": "what a model costs: layers, parameters, MACs, and how much attending less can gain",
    "convert": "put another attention into a pretrained model, without training",
    "bench": "measure speed and memory against the dense model, on this machine",
    "eval": "measure accuracy, and agreement with the dense model, on a folder of images",
    "tune": "search per-layer settings that keep the answers and save milliseconds",
    "train": "train a model",
    "distill": "train a model that attends less to answer as its teacher does",
    "compare": "train and measure attentions under identical conditions, with a report",
    "check": "run the contract that every attention keeps on any attention, yours too",
    "list": "the attentions and models that exist",
    "papers": "the papers' tables, counted again",
    "doctor": "what this installation and this machine can do",
}


class Parser(argparse.ArgumentParser):
    """argparse, with mistakes answered on one line."""

    def error(self, message: str) -> NoReturn:
        fail(f"{message} (see {self.prog} --help)")


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=min(120, _columns()))


def fail(message: str) -> NoReturn:
    print(f"attendless: error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """The console script."""
    raise SystemExit(main(sys.argv[1:] if argv is None else list(argv)))


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="attendless",
        description="Vision Transformers that attend less, and are measurably faster for it.",
        epilog="start with:      attendless info deit_tiny_patch16_224 --size 224 384\n"
        "help on a verb:  attendless VERB --help\n\n"
        "exit codes:      0 done · 1 a check, a run or an image failed · 2 a mistake in what was given · 130 stopped",
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    _plugin(parser, "plugin")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs", parser_class=Parser)
    asked = next((word for word in argv if word in VERBS), None)
    module = importlib.import_module(f"{__package__}.{asked}") if asked else None
    for name, line in VERBS.items():
        if name == asked and module is not None:
            verb = verbs.add_parser(name, help=line, description=module.__doc__, formatter_class=_Help)
            module.arguments(verb)
            _plugin(verb, "plugin_of_verb")
        else:
            verbs.add_parser(name, help=line, add_help=False)
    args = parser.parse_args(argv)
    if args.version:
        from importlib.metadata import version

        print(f"attendless {version('attendless')}")
        return 0
    if module is None:
        parser.print_help()
        return 0
    return _run(module, args)


def _plugin(parser: argparse.ArgumentParser, name: str) -> None:
    """`--plugin`, before the verb or after it."""
    text = "a Python file that registers attentions or executors; may be repeated"
    parser.add_argument("--plugin", dest=name, action="append", default=[], metavar="FILE", help=text)


def _run(module: object, args: argparse.Namespace) -> int:
    try:
        from attendless.errors import UserError
        from attendless.plugins import load_plugin
    except KeyboardInterrupt:
        return 130
    try:
        for plugin in (*args.plugin, *args.plugin_of_verb):
            load_plugin(plugin)
        return module.run(args) or 0  # type: ignore[attr-defined]
    except UserError as error:
        fail(str(error))
    except BrokenPipeError:  # the reader (head, less) has gone; there is nobody left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error))
    except KeyboardInterrupt:
        print("attendless: stopped", file=sys.stderr)
        return 130


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size((100, 24)).columns
