"""Answers as Parquet in a folder, shard by shard: what is there whole is not computed again.

    DIR/_plan.json                     what is computed, of which pictures: another command does not write into it
    DIR/part-00012-of-00345.parquet    the pictures of one shard, in order; its name follows from the plan

A shard appears under its name once all of it is on disk. So any process may be lost at any moment, and whoever gives
the command again computes what is missing. Columns: `image`, `error` (why it could not be read, or null), `class`,
`name` and `probability` (lists, the likeliest first), `features`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..export.packages import need
from ..storage import atomic
from .answers import Answer
from .model import Opening, Predictor
from .run import predict

#: Readers of Parquet folders pass over what begins with an underscore.
PLAN = "_plan.json"
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of the work, in plain values: its file, and the pictures whose answers belong there."""

    path: str
    images: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is computed, of which pictures, and how it is cut."""

    opening: Opening
    images: tuple[str, ...]
    topk: int = 5
    batch: int = 32
    shard: int = 1024

    def shards(self, folder: Path) -> list[Shard]:
        count = -(-len(self.images) // self.shard)
        digits = max(5, len(str(count)))
        return [
            Shard(
                str(folder / f"part-{number:0{digits}d}-of-{count:0{digits}d}.parquet"),
                self.images[number * self.shard : (number + 1) * self.shard],
            )
            for number in range(count)
        ]

    def as_dict(self) -> dict[str, Any]:
        """What makes it the same work: not how many threads carry it out."""
        opening = dataclasses.asdict(self.opening)
        del opening["threads"], opening["plugins"]
        files = [name for name in (self.opening.model, self.opening.weights, self.opening.predictor) if name]
        listed = hashlib.blake2b("\0".join(self.images).encode(errors="surrogateescape"), digest_size=16)
        found = {
            "format": FORMAT,
            **opening,
            "content": {name: _digest(Path(name)) for name in files if Path(name).is_file()},
            "images": len(self.images),
            "list": listed.hexdigest(),
            **{name: getattr(self, name) for name in ("topk", "batch", "shard")},
        }
        return json.loads(json.dumps(found))


def begin(plan: Plan, folder: str | Path) -> list[Shard]:
    """Make the folder, or find it again, and say which shards are missing. Another plan's folder is refused."""
    need("cluster", "pyarrow")
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {str(folder)!r} is a file: expected a folder for the results")
    wanted, path = plan.as_dict(), folder / PLAN
    if path.is_file():
        _check_same(folder, path, wanted)
    elif folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"--out {str(folder)!r} holds files that are no results of `predict`: give an empty folder")
    else:
        with atomic(path) as temporary:
            temporary.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
    return [shard for shard in plan.shards(folder) if not os.path.isfile(shard.path)]


def compute(predictor: Predictor, shard: Shard, *, batch: int, topk: int) -> int:
    """Answer the pictures of one shard and write them; how many they were."""
    answers = [answer for part in predict(predictor, shard.images, batch=batch, topk=topk) for answer in part]
    write(shard.path, answers, features=predictor.card.features)
    return len(answers)


def compute_here(predictor: Predictor, plan: Plan, shards: Sequence[Shard]) -> Iterator[int]:
    for shard in shards:
        yield compute(predictor, shard, batch=plan.batch, topk=plan.topk)


def unreadable(shards: Sequence[Shard]) -> list[str]:
    """Why pictures could not be read, out of the shards' own files."""
    from pyarrow import parquet

    found: list[str] = []
    for shard in shards:
        column = parquet.read_table(shard.path, columns=["error"], partitioning=None).column("error")
        found += column.drop_null().to_pylist()
    return found


def write(path: str | Path, answers: Sequence[Answer], *, features: int = 0) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    columns: dict[str, tuple[Any, list[Any]]] = {
        "image": (arrow.string(), [_text(answer.image) for answer in answers]),
        "error": (arrow.string(), [answer.error and _text(answer.error) for answer in answers]),
        "class": (arrow.list_(arrow.int32()), [answer.classes for answer in answers]),
        "name": (arrow.list_(arrow.string()), [answer.names for answer in answers]),
        "probability": (arrow.list_(arrow.float32()), [answer.probabilities for answer in answers]),
    }
    if features:
        columns["features"] = (arrow.list_(arrow.float32(), features), [answer.features for answer in answers])
    schema = arrow.schema([(name, kind) for name, (kind, _) in columns.items()])
    table = arrow.table({name: arrow.array(values, kind) for name, (kind, values) in columns.items()}, schema=schema)
    with atomic(path) as temporary:
        parquet.write_table(table, temporary)


def _check_same(folder: Path, path: Path, wanted: dict[str, Any]) -> None:
    try:
        there = json.loads(path.read_text(encoding="utf-8"))
        different = [name for name in wanted if there.get(name) != wanted[name]]
    except (ValueError, AttributeError):
        raise UserError(f"--out {str(folder)!r}: its {PLAN} is damaged; give another folder") from None
    if different:
        raise UserError(
            f"--out {str(folder)!r} holds the results of another command, with another {' and '.join(different)}: "
            "give that one again, or another folder"
        )


def _text(text: str) -> str:
    """A file's name need not be text; what is not, is written as \\x.."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        found = hashlib.blake2b(digest_size=16)
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()
