"""Predictions as Parquet files in a folder, one per shard; finished shards are not computed again.

    DIR/_plan.json                     settings and images; a command with other settings refuses the folder
    DIR/part-00012-of-00345.parquet    the images of one shard, in order; the name follows from the plan

A shard gets its name when it is complete on disk. So a process can be lost at any time, and the same command computes
the missing shards. Columns: `image`, `error` (why the image could not be read, or null), `class`, `name` and
`probability` (lists, most probable first), `features`.
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

#: Readers of Parquet folders skip names that begin with an underscore.
PLAN = "_plan.json"
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of the job: its output file and its images."""

    path: str
    images: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A job: model, images, and the size of batches and shards."""

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
        """The settings that determine the results; threads and plug-ins are not part of them."""
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
    """Create or reopen the folder, and return the missing shards; raises if the folder belongs to another plan."""
    need("cluster", "pyarrow")
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {str(folder)!r} is a file: expected a folder for the results")
    wanted, path = plan.as_dict(), folder / PLAN
    if path.is_file():
        _check_same(folder, path, wanted)
    elif folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"--out {str(folder)!r} contains files that `predict` did not write: give an empty folder")
    else:
        with atomic(path) as temporary:
            temporary.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
    return [shard for shard in plan.shards(folder) if not os.path.isfile(shard.path)]


def compute(predictor: Predictor, shard: Shard, *, batch: int, topk: int) -> int:
    """Compute and write the predictions of one shard; returns the number of images."""
    answers = [answer for part in predict(predictor, shard.images, batch=batch, topk=topk) for answer in part]
    write(shard.path, answers, features=predictor.card.features)
    return len(answers)


def compute_here(predictor: Predictor, plan: Plan, shards: Sequence[Shard]) -> Iterator[int]:
    for shard in shards:
        yield compute(predictor, shard, batch=plan.batch, topk=plan.topk)


def unreadable(shards: Sequence[Shard]) -> list[str]:
    """The reasons why images could not be read, from the files of the shards."""
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
            f"--out {str(folder)!r} contains the results of a command with another {' and '.join(different)}: "
            "repeat that command, or give another folder"
        )


def _text(text: str) -> str:
    """A file name as valid UTF-8; other bytes are written as \\x.."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        found = hashlib.blake2b(digest_size=16)
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()
