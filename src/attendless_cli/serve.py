"""Answer over HTTP what is in a picture. Pictures that arrive together are computed together: the model takes up to
--batch at once and waits at most --wait-ms for more. The model runs in processes of its own; one that dies is started
again, and what it was at is computed again. Ctrl-C or SIGTERM lets it finish what it has, then it stops.

Pictures are told by their content. What is too large, damaged or no picture is refused with a reason, and requests
beyond --queue are told to come again (503), so that memory stays bounded. There is no password and no encryption: on
other addresses than 127.0.0.1 put it behind something that has both.

examples:
  attendless serve deit_tiny_patch16_224 --weights deit.safetensors
  attendless serve fast.onnx --batch 16 --workers 2 --threads 4 --port 8080
  curl --data-binary @dog.jpg localhost:8000/predict
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from . import arguments, output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"{arguments.MODEL}, or exported (.onnx, .xml, .pt2)")
    arguments.opening(parser)
    parser.add_argument("--host", metavar="H", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    text = "port to listen at; 0 takes a free one (default: 8000)"
    parser.add_argument("--port", metavar="P", type=arguments.port, default=8000, help=text)
    parser.add_argument(
        "--batch", metavar="B", type=arguments.positive, default=8, help="images at a time (default: 8)"
    )
    text = "milliseconds that a picture waits for others (default: 5)"
    parser.add_argument("--wait-ms", metavar="W", type=arguments.not_negative, default=5.0, help=text)
    text = "processes with the model (default: 1)"
    parser.add_argument("--workers", metavar="N", type=arguments.positive, default=1, help=text)
    text = "requests served at a time; more are told to come again (default: 64)"
    parser.add_argument("--queue", metavar="Q", type=arguments.positive, default=64, help=text)
    text = "megabytes that a request may have (default: 10)"
    parser.add_argument("--max-mb", metavar="M", type=arguments.above_zero, default=10.0, help=text)
    text = "million pixels that a picture may have (default: 50)"
    parser.add_argument("--max-megapixels", metavar="M", type=arguments.above_zero, default=50.0, help=text)
    text = "answers a picture, unless the request says otherwise (default: 5)"
    parser.add_argument("--topk", metavar="K", type=arguments.positive, default=5, help=text)
    text = "also give what the model computes before its classifier"
    parser.add_argument("--features", action="store_true", help=text)
    arguments.json(parser)


def run(args: argparse.Namespace) -> None:
    import dataclasses

    from attendless.serve import Settings, serve

    settings = Settings(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)})

    def ready(card: Any, address: str) -> None:
        if card.random:
            print("random weights: these answers mean nothing. Give --weights F", file=sys.stderr)
        if args.host not in ("127.0.0.1", "localhost", "::1"):
            print(f"{args.host}: whoever reaches this machine can use it; there is no password", file=sys.stderr)
        found = card.description
        print(f"{found.model} ({found.attention}, {card.runtime}) answers at {address}; Ctrl-C stops", flush=True)
        about = {"model": found.model, "attention": found.attention, "tokens_spec": found.tokens or None}
        row = about | {"runtime": card.runtime, "size": list(found.size), "address": address}
        output.write_json(args.json, {"rows": [row | dataclasses.asdict(settings)]})

    serve(arguments.opened(args, features=args.features), settings, on_ready=ready)
    print("stopped: everything accepted has been answered", file=sys.stderr)
