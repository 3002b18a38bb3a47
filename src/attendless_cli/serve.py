"""Classify images over HTTP. Images that arrive together are computed together: the model takes up to --batch at once
and waits at most --wait-ms for more. The model runs in worker processes; one that dies is restarted, and its requests
are computed again. After Ctrl-C or SIGTERM the server completes the requests that it has accepted, then stops.

The type of an image is read from its content. Images that are too large or damaged are refused with a reason, and
requests beyond --queue receive status 503, so that memory stays bounded. There is no password and no encryption: on
addresses other than 127.0.0.1, put it behind a proxy that has both.

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
    arguments.opening(parser)
    arguments.host(parser)
    text = "port to listen on; 0 takes a free one"
    parser.add_argument("--port", metavar="P", type=arguments.port, default=8000, help=text)
    arguments.batch(parser, 8)
    text = "milliseconds that an image waits for others"
    parser.add_argument("--wait-ms", metavar="W", type=arguments.not_negative, default=5.0, help=text)
    text = "worker processes that hold the model"
    parser.add_argument("--workers", metavar="W", type=arguments.at_least_one, default=1, help=text)
    text = "requests in progress; more receive status 503"
    parser.add_argument("--queue", metavar="Q", type=arguments.positive, default=64, help=text)
    text = "largest request in megabytes"
    parser.add_argument("--max-mb", metavar="M", type=arguments.above_zero, default=10.0, help=text)
    text = "largest image in millions of pixels"
    parser.add_argument("--max-megapixels", metavar="M", type=arguments.above_zero, default=50.0, help=text)
    text = "predictions per image, unless the request asks for another number"
    parser.add_argument("--topk", metavar="K", type=arguments.positive, default=5, help=text)
    arguments.features(parser)
    arguments.json(parser)


def run(args: argparse.Namespace) -> None:
    import dataclasses

    from attendless.serve import Settings, serve

    settings = Settings(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)})
    settings = dataclasses.replace(settings, allow_host=tuple(args.allow_host))

    def ready(card: Any, address: str) -> None:
        if card.random:
            print("random weights: these predictions mean nothing. Give --weights F", file=sys.stderr)
        if args.host not in ("127.0.0.1", "localhost", "::1"):
            print(f"{args.host}: everyone who can reach this machine can use it; there is no password", file=sys.stderr)
        found = card.description
        print(f"{found.model} ({found.attention}, {card.runtime}) serves at {address}; Ctrl-C stops", flush=True)
        about = {"model": found.model, "attention": found.attention, "tokens_spec": found.tokens or None}
        row = about | {"runtime": card.runtime, "size": list(found.size), "address": address}
        output.write_json(args.json, {"rows": [row | dataclasses.asdict(settings)]})

    serve(arguments.opened(args, features=args.features), settings, on_ready=ready)
    print("stopped: all accepted requests are finished", file=sys.stderr)
