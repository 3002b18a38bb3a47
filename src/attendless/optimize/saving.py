"""The output folder of `optimize`: the model file, `manifest.json` and `report.html`.

The folder is written under a temporary name beside its place and renamed at the end, so that no partial folder is ever
visible under its name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from ..convert.files import save as save_model
from ..errors import UserError
from ..export import pt2
from ..export.description import Description
from ..export.exporting import finite, write
from ..export.folder import FORMAT, MANIFEST, deployed
from ..export.packages import versions
from ..export.runner import OPENERS
from ..integrations.rebuild.copying import backbone_copy
from ..storage import sync
from .outcomes import Findings
from .outcomes_page import page


def save(found: Findings, folder: Path, name: str | None, command: str) -> Path:
    """Write the folder; one that `save` wrote before is replaced. Returns the model file."""
    folder = Path(os.path.realpath(folder))
    if folder.exists() and any(folder.iterdir()) and deployed(folder) is None:
        raise UserError(f"{str(folder)!r} holds files that attendless optimize did not write: give another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name[:50]}."))
    try:
        about = found.workshop.describe(found.chosen.variant)
        about = dataclasses.replace(about, model=name or about.model, versions=versions(), report=_report(found))
        file, about = _put_model(found, temporary, about)
        told = manifest(found, file, about, command)
        (temporary / MANIFEST).write_text(json.dumps(told, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        text = page(found, about, f"{about.model} · {found.images} images", _how_to_run(folder, about), command)
        (temporary / "report.html").write_text(text, encoding="utf-8")
        for written in temporary.iterdir():
            sync(written)
        temporary.chmod(0o755)
        _rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder / file.name


def _put_model(found: Findings, folder: Path, about: Description) -> tuple[Path, Description]:
    """Write the model file into the folder."""
    variant, source = found.chosen.variant, found.prepared.file
    target = variant.target
    if source is None:
        return _put_pytorch(found.workshop.module(variant.change), folder, about)
    for part in target.module.files(source):
        shutil.copy2(part, folder / part.name)
    file = folder / source.name
    ours = any(kind.startswith("attendless.") for kind in target.module.operators(file))
    about = dataclasses.replace(about, kernels=ours)
    target.module.stamp(file, about)
    return file, about


def _put_pytorch(module: nn.Module, folder: Path, about: Description) -> tuple[Path, Description]:
    """Write a model that PyTorch runs: as a checkpoint, or as a traced graph if no checkpoint can rebuild it."""
    file = folder / "model.safetensors"
    try:
        save_model(backbone_copy(module), file)
    except UserError:
        file = folder / f"model{pt2.SUFFIX}"
        write(module, file, batch=about.batch, format="pt2")
        pt2.stamp(file, about)
    return file, about


def _rename(temporary: Path, folder: Path) -> None:
    """Give the temporary folder its name. A folder cannot be replaced in one step, so the old one goes aside first."""
    old = None
    if folder.exists():
        old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name[:50]}.old."))
        os.replace(folder, old / folder.name)
    os.replace(temporary, folder)
    sync(folder.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def manifest(found: Findings, file: Path, about: Description, command: str) -> dict[str, Any]:
    """The manifest as JSON: all that a deployment has to know."""
    target = found.chosen.target
    return {
        "stamp": dict(found.stamp),
        "format": FORMAT,
        "file": file.name,
        "files": sorted(part.name for part in file.parent.iterdir()),
        "runtime": OPENERS[file.suffix][0] if file.suffix in OPENERS else target.runtime,
        "precision": target.precision,
        "floats": about.floats,
        "kernels": about.kernels,
        "model": about.model,
        "attention": about.attention,
        "tokens": about.tokens or None,
        "input": {"batch": about.batch, "channels": about.channels, "size": list(about.size)},
        "preprocessing": {**about.data_config(), "input_size": [about.channels, *about.size]},
        "classes": about.classes,
        "class_names": list(about.class_names),
        "threads": found.stamp["threads"],
        "command": command or None,
        "versions": dict(about.versions),
        **finite(found.as_dict()),
        "variants": [finite(one.as_dict()) for one in found.outcomes],
    }


def _report(found: Findings) -> dict[str, Any]:
    return finite({"optimized": {key: found.as_dict()[key] for key in ("goal", "chosen", "fresh")}})


def _how_to_run(folder: Path, about: Description) -> str:
    """The three lines of Python that run the folder's model."""
    size = ", ".join(map(str, (about.batch or 1, about.channels, *about.size)))
    return (
        "from attendless.export import open_runner\n"
        f"run = open_runner({folder.name!r})\n"
        f"logits = run(images)  # normalised images [{size}]"
    )
