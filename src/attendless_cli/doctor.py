"""Report what this installation and this machine support: versions, threads, instruction sets, whether bf16 is safe,
whether the native kernels were built, and which extras are installed.

examples:
  attendless doctor
  attendless doctor --json doctor.json
"""

from __future__ import annotations

import argparse

from . import arguments, output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.json(parser)


def run(args: argparse.Namespace) -> None:
    from attendless.measure.doctor import examine

    findings = examine()
    output.print_table("attendless doctor", ("", "value", "note"), [(f.name, f.value, f.note) for f in findings])
    output.write_json(
        args.json, {"rows": [{"name": f.name, "value": f.value, "note": f.note, "ok": f.ok} for f in findings]}
    )
