"""Models on the Hugging Face Hub: the file that `save` writes, with a card that says what it is and what was measured.

    attendless.push_to_hub(fast, "me/deit-tiny-foveal", measurements=attendless.bench(fast, like=model))
    fast = attendless.from_hub("me/deit-tiny-foveal")

Nothing is sent or fetched but by these two calls. A folder in place of a repository's name stays on this machine.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from ..convert import load, save
from ..convert.report import Report
from ..errors import UserError
from ..integrations.pretrained import offline_if_unreachable
from ..storage import atomic
from .card import Measured, card

#: The files of a repository.
FILE, CARD = "model.safetensors", "README.md"


def push_to_hub(
    model: nn.Module,
    repo_id: str,
    *,
    measurements: Measured | Iterable[Measured] = (),
    report: Report | None = None,
    text: str = "",
    license: str | None = None,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
    message: str = "Upload with attendless",
) -> str:
    """Send a model to the repository `repo_id` (`name/model`), made if it is not there; its address.

    The card holds a table of `measurements` (what `bench` returns, or its JSON) and `text`, in Markdown. Where
    `repo_id` is a path (`./folder`) the same files are written there, and nothing is sent.
    """
    if _is_path(repo_id):
        _write(model, Path(repo_id), measurements, report, text, license, repo_id)
        return str(repo_id)
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as folder, _in_words(f"model cannot be sent to {repo_id!r}"):
        _write(model, Path(folder), measurements, report, text, license, repo_id)
        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        found = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message, revision=revision)
    return str(getattr(found, "repo_url", None) or f"{api.endpoint}/{repo_id}")


def from_hub(repo_id: str | Path, *, revision: str | None = None, token: str | None = None) -> Any:
    """The model in a repository (`name/model`) or a folder, on the CPU and in evaluation mode.

    What has been fetched once is kept by `huggingface_hub`, and is found there without a network.
    """
    if _is_path(repo_id) or Path(repo_id).is_dir():
        return load(Path(repo_id) / FILE)
    from huggingface_hub import hf_hub_download

    with _in_words(f"model {str(repo_id)!r} cannot be fetched"):
        path = hf_hub_download(str(repo_id), FILE, revision=revision, token=token)
    return load(path)


def _is_path(repo_id: str | Path) -> bool:
    return isinstance(repo_id, Path) or str(repo_id).startswith(("/", "./", "../", "~"))


def _write(
    model: nn.Module,
    folder: Path,
    measurements: Measured | Iterable[Measured],
    report: Report | None,
    text: str,
    license: str | None,
    repo_id: str | Path,
) -> None:
    folder = folder.expanduser()
    save(model, folder / FILE, report=report)
    with atomic(folder / CARD) as temporary:
        temporary.write_text(card(model, repo_id, measurements, text=text, license=license), encoding="utf-8")


@contextlib.contextmanager
def _in_words(what: str) -> Iterator[None]:
    """What goes wrong with the Hub or on the way there, in one sentence."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        with offline_if_unreachable():
            yield
    except UserError:
        raise
    except (OfflineModeIsEnabled, LocalEntryNotFoundError):
        raise UserError(f"{what}: the Hub does not answer, or HF_HUB_OFFLINE forbids to ask it") from None
    except HFValidationError:
        raise UserError(f"{what}: expected NAME/MODEL, or a folder written as ./FOLDER") from None
    except Exception as error:  # every library on the way has its own
        raise UserError(f"{what}: {' '.join(str(error).split())[:300] or type(error).__name__}") from None
