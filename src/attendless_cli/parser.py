"""The argument parser: argparse with one-line errors, suggestions for misspelled names, and defaults in every help.

A command is a module of this package with a docstring (its help, which ends in examples), `add_arguments(parser)` and
`run(args)`, which returns an exit code or None. `Command` imports the module when that command is parsed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, NoReturn

#: Flags of earlier versions, and what to give instead where a command has it.
RENAMED = {
    "--limit": "--images N",
    "--seeds": "--seed S …",
    "--layer": "--layers L",
    "--compile": "--runtime compile",
    "--model": "MODEL as the first argument",
    "--image": "IMAGE after MODEL",
}


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations. Every error is one line and exits with 2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": Help, **kwargs})

    def error(self, message: str) -> NoReturn:
        fail(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        self.refuse_unknown_flags(takewhile(lambda word: word.startswith("-"), given))
        return super().parse_known_args(given, namespace)

    def refuse_unknown_flags(self, given: Iterable[str]) -> None:
        """Report a flag that does not exist, before argparse reports what is missing because of it."""
        for word in takewhile(lambda word: word != "--", given):
            flag = word.partition("=")[0]
            if flag.startswith("--") and " " not in flag and flag not in self._option_string_actions:
                self.error(f"unrecognized flag {flag!r}. {self.instead(flag)}".rstrip(". "))

    def instead(self, flag: str) -> str:
        """What to give in place of a flag that does not exist; empty if nothing is similar."""
        return suggestion(flag, (name for name in self._option_string_actions if name.startswith("--")))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = list(map(str, action.choices))
        listed = f"There are: {', '.join(names)}"
        if isinstance(action, argparse._SubParsersAction):
            raise argparse.ArgumentError(None, f"unknown command {value!r}. {suggestion(value, names)}{listed}")
        raise argparse.ArgumentError(action, f"unknown value {value!r}. {suggestion(str(value), names)}{listed}")


class Command(Parser):
    """The parser of one command. Its arguments come from the command's module, imported when it parses."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        module = importlib.import_module(f"{__package__}.{self.prog.split()[-1]}")
        self.description = module.__doc__
        module.add_arguments(self)
        add_plugin(self, "plugin_of_command")
        self.set_defaults(run_command=module.run)
        self.refuse_unknown_flags(args)
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def instead(self, flag: str) -> str:
        known = self._option_string_actions
        renamed = RENAMED.get(flag, "")
        positional = {action.dest for action in self._actions if not action.option_strings}
        if renamed.split(" ")[0] in known or flag.removeprefix("--") in positional:
            return f"Give {renamed}"
        if "--set" in known:
            from . import settings

            key = flag.removeprefix("--").replace("-", "_")
            if key in settings.names():
                return f"It is a field of the recipe: give --set {key}=VALUE"
        return super().instead(flag)


class Help(argparse.RawDescriptionHelpFormatter):
    """Help that states of every flag whether it is required, its default and its choices."""

    def __init__(self, prog: str) -> None:
        import shutil

        width = min(120, shutil.get_terminal_size((100, 24)).columns)
        super().__init__(prog, max_help_position=28, width=width)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if not action.option_strings or action.nargs == 0:
            return text
        if action.required:
            return f"{text} (required)"
        if action.choices is not None and action.metavar is not None and "choices" not in text:
            text += f" (choices: {', '.join(map(str, action.choices))})"
        if "default:" in text or action.default is None or action.default == []:
            return text
        default = action.default
        shown = (
            " ".join(map(str, default)) if isinstance(default, Sequence) and not isinstance(default, str) else default
        )
        return f"{text} (default: {str(shown).replace('%', '%%')})"


def add_plugin(parser: argparse.ArgumentParser, dest: str) -> None:
    """`--plugin`, before the command or after it."""
    text = "a Python file that registers attentions or backends; may be repeated (default: none)"
    parser.add_argument("--plugin", dest=dest, action="append", default=[], metavar="FILE", help=text)


def suggestion(given: str, names: Iterable[str]) -> str:
    """`Did you mean 'convert'? ` for the closest of `names`, or nothing."""
    from difflib import get_close_matches

    close = get_close_matches(given, list(names), n=1)
    return f"Did you mean {close[0]!r}? " if close else ""


def fail(message: str) -> NoReturn:
    """Print one line on the error stream and exit with 2."""
    line = " ".join(message.split())
    if len(line) > 1000:  # the line repeats what was given, which may be of any length
        line = f"{line[:600]} … {line[-300:]}"
    print(f"attendless: error: {line}", file=sys.stderr)
    raise SystemExit(2)
