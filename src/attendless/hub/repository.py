"""Models on the Hugging Face Hub: the file that `save` writes, with a model card.

    attendless.push_to_hub(fast, "me/deit-tiny-foveal", measurements=attendless.bench(fast, like=model))
    fast = attendless.from_hub("me/deit-tiny-foveal")

Only these two functions use the network. A path instead of a repository name stays on this machine.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

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
    """Upload a model with its card to a repository of the Hugging Face Hub, or write both to a folder.

    Args:
        model: A model that `save` can write.
        repo_id: The repository (`name/model`), which is created if needed, or a path (`./folder`): nothing is sent
            then.
        measurements: Results of `bench`, or their JSON, for the table of the card.
        report: The report of the conversion, stored in the file.
        text: Further text of the card, in Markdown.
        license: The license that the card names.
        private: Whether a new repository is private.
        revision: The branch to upload to; default: the main branch.
        token: An access token; default: the one that `huggingface_hub` has stored.
        message: The commit message.

    Returns:
        The address of the repository, or the path.

    Raises:
        UserError: the model cannot be saved, or the Hub refuses the upload.
    """
    if _is_path(repo_id):
        _write(model, Path(repo_id), measurements, report, text, license, repo_id)
        return str(repo_id)
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as folder, _in_words(f"model cannot be uploaded to {repo_id!r}"):
        _write(model, Path(folder), measurements, report, text, license, repo_id)
        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        found = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message, revision=revision)
    return str(getattr(found, "repo_url", None) or f"{api.endpoint}/{repo_id}")


def from_hub(repo_id: str | Path, *, revision: str | None = None, token: str | None = None) -> nn.Module:
    """Load a model from a repository of the Hugging Face Hub, or from a folder.

    `huggingface_hub` caches what was fetched, so that it is found again without a network.

    Args:
        repo_id: The repository (`name/model`), or a folder that `push_to_hub` wrote.
        revision: Branch, tag or commit; default: the main branch.
        token: An access token; default: the one that `huggingface_hub` has stored.

    Returns:
        The model, on the CPU and in evaluation mode. See `load`.

    Raises:
        UserError: there is no such repository, the Hub cannot be reached, or the file is damaged.
    """
    if _is_path(repo_id) or Path(repo_id).is_dir():
        return load(Path(repo_id) / FILE)
    from huggingface_hub import hf_hub_download

    with _in_words(f"model {str(repo_id)!r} cannot be downloaded"):
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
    """Report errors of the Hub and of the network as `UserError`."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        with offline_if_unreachable():
            yield
    except UserError:
        raise
    except (OfflineModeIsEnabled, LocalEntryNotFoundError):
        raise UserError(f"{what}: the Hub does not respond, or HF_HUB_OFFLINE is set") from None
    except HFValidationError:
        raise UserError(f"{what}: expected NAME/MODEL, or a folder written as ./FOLDER") from None
    except Exception as error:  # each library raises its own errors
        raise UserError(f"{what}: {' '.join(str(error).split())[:300] or type(error).__name__}") from None
