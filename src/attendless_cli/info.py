"""Print the cost of a model with given attentions: layers, parameters, multiply-accumulates (MACs) of the attention
core, projections, MLP and the rest, and the maximum speed-up of sparser attention (Amdahl's law). Every attention is
counted as given, also where it is not faster.

examples:
  attendless info deit_small_patch16_224
  attendless info deit_tiny_patch16_224 --attention full foveal:keep=0.1 --size 224 384 1024
  attendless info deit_tiny_patch16_224 --tokens none tome:r=8 evit:keep=0.7
"""

from __future__ import annotations

import argparse
import itertools
from typing import TYPE_CHECKING, Any

from . import arguments, output

if TYPE_CHECKING:
    from torch import nn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.model(parser)
    arguments.attention(parser)
    arguments.tokens(parser)
    arguments.readout(parser, default=arguments.FOR_ALL)
    arguments.size(parser)
    parser.add_argument("--per-layer", action="store_true", help="also print one row per layer; always for one variant")
    arguments.json(parser)


def run(args: argparse.Namespace) -> None:
    from attendless.convert import convert, open_model
    from attendless.convert.source import comparable
    from attendless.integrations.discovery import exchangeable
    from attendless.measure.macs import layer_costs
    from attendless.sizes import input_size, size_text

    rows, table, per_layer = [], [], []
    wanted = itertools.product(args.attention or [None], args.tokens or [None], args.size or [None])
    opening = {"weights": args.weights, "pretrained": args.pretrained, "readout": args.readout}
    opening = comparable(opening, args.attention, args.tokens)
    for attention, tokens, size in wanted:
        asked = {"attention": attention, "tokens": tokens, "size": size, "below_breakeven": "keep"}
        model = open_model(args.model, **asked, **opening)
        if not exchangeable(model):
            model = convert(model, "full")  # the same function, whose MACs are counted by formula
        found = layer_costs(model, size)
        row = _row(args.model, model, found, size or input_size(model))
        rows.append(row)
        table.append(_cells(row))
        title = f"{args.model} · {table[-1][0]} · {size_text(row['size'])} px"
        per_layer.append((title, found))
    columns = (
        "attention",
        "size",
        "tokens",
        "params",
        "MACs",
        "core",
        "projections",
        "MLP",
        "other",
        "core share",
        "cap",
    )
    output.print_table(args.model, columns, table, note=NOTE)
    if args.per_layer or len(rows) == 1:
        for title, found in per_layer:
            print()
            _print_layers(title, found)
    output.write_json(args.json, {"rows": rows})


NOTE = (
    "MACs: multiply-accumulates for one image. cap: the maximum speed-up (Amdahl's law), if the attention core cost "
    "nothing;\nmeasure the speed-up on this machine with `attendless bench`."
)


def _row(name: str, model: nn.Module, found: list[Any], size: tuple[int, int]) -> dict[str, Any]:
    from attendless.attention import Macs
    from attendless.measure.subject import attention_of, tokens_of

    macs = sum((layer.macs for layer in found), start=Macs())
    return {
        "model": name,
        "attention": attention_of(model),
        "tokens_spec": tokens_of(model) or None,
        "size": list(size),
        "tokens": found[0].grid.tokens,
        "params": sum(layer.params for layer in found),
        "macs": macs.as_dict(),
        "attention_share": macs.share,
        "cap": macs.cap,
        "layers": [
            {
                "name": layer.name,
                "attention": str(layer.spec) if layer.spec else None,
                "tokens": layer.grid.tokens,
                "params": layer.params,
                "macs": layer.macs.as_dict(),
                "path": layer.choice.backend if layer.choice else None,
                "reason": layer.choice.reason if layer.choice else None,
            }
            for layer in found
        ],
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    from attendless.measure.measurement import made_of
    from attendless.sizes import size_text

    macs = row["macs"]
    return (
        made_of(row["attention"], row["tokens_spec"]),
        size_text(row["size"]),
        str(row["tokens"]),
        output.millions(row["params"]),
        *(output.millions(macs[part]) for part in ("total", "core", "projections", "mlp", "other")),
        output.percent(row["attention_share"]),
        f"{row['cap']:.2f}×",
    )


def _print_layers(title: str, found: list[Any]) -> None:
    from attendless.convert.report import folded

    table = [
        (
            layer.name,
            str(layer.grid),
            output.millions(layer.params),
            *(output.millions(getattr(layer.macs, part)) for part in ("total", "core", "projections", "mlp", "other")),
            str(layer.spec or ""),
            layer.choice.backend if layer.choice else "",
        )
        for layer in found
    ]
    columns = ("layer", "grid", "params", "MACs", "core", "projections", "MLP", "other", "attention", "backend")
    shown = folded(table)
    note = "Rows of several equal layers show the figures of one of them." if len(shown) < len(table) else ""
    output.print_table(title, columns, shown, note=note)
