"""Questions to the Hugging Face Hub that end within seconds where there is no network.

Its own client retries a failed look-up for 23 s (huggingface_hub 1.x), twice for a data set.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from src.errors import UserError

TIMEOUT = 5.0  # seconds


def reachable(kind: Literal["model", "dataset"], name: str) -> bool:
    """Whether the Hub answers, asked once. False without a network, or where HF_HUB_OFFLINE is set.

    Raises UserError where the Hub answers that it has no such repository (or not for this user).
    """
    return _ask(kind, name) is not None


def commit(name: str, revision: str | None) -> str | None:
    """The commit that a data set's revision (None: its main branch) is now; None where the Hub does not answer.

    Raises UserError where the Hub answers that it has no such data set or revision.
    """
    info = _ask("dataset", name, revision)
    return None if info is None else info.sha


def downloaded_commit(name: str, revision: str | None) -> str | None:
    """The commit of an earlier download, from the Hub's local cache; None where that does not tell one."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}")
    ref = folder / "refs" / (revision or "main")
    if ref.is_file():
        return ref.read_text().strip()
    commits = [path.name for path in folder.glob("snapshots/*")] if revision is None else []
    return commits[0] if len(commits) == 1 else None


def load(
    origin: str,
    hub_id: str,
    remedy: str,
    *,
    subset: str | None,
    commit: str,
    data_files: list[str] | None = None,
    streaming: bool = False,
) -> Mapping[str, Any]:
    """All splits of a data set as tables of `datasets`: streamed, or downloaded and prepared once.

    Whatever goes wrong is one line that names `origin` and what to give instead.
    """
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and not reachable("dataset", hub_id):
        raise UserError(
            f"{origin}: the Hub cannot be reached for {hub_id}; {remedy} (or HF_HUB_OFFLINE=1 for an earlier download)"
        )
    try:
        from datasets import disable_progress_bars, load_dataset_builder
    except ImportError as error:
        raise UserError(f"{origin} needs the package datasets ({error}): pip install datasets") from error
    if not sys.stderr.isatty():  # its bars flood a log
        disable_progress_bars()
    try:
        builder = load_dataset_builder(hub_id, name=subset, revision=commit, data_files=data_files)
        if builder.hash == commit:
            if streaming:
                return builder.as_streaming_dataset()
            builder.download_and_prepare()
            return builder.as_dataset()
    except Exception as error:  # no network after all, no such subset, a full disk: each in its own class
        raise UserError(f"{origin}: {hub_id} cannot be loaded ({cause(error)}); {remedy}") from error
    # Offline, `datasets` takes the latest download, whichever is asked for.
    raise UserError(f"{origin}: what is downloaded of {hub_id} is commit {builder.hash}, not {commit}; {remedy}")


def cause(error: Exception) -> str:
    """Why `datasets` failed, in one short line."""
    message = " ".join(str(error).split())
    if "zstandard" in message or "zstd not supported" in message:  # its messages do not say what to do
        return "it is compressed with zstd: pip install zstandard"
    return message[:300] or type(error).__name__


def tokenizer_file(name: str) -> Path:
    """The tokenizer.json of a Hub model: from the network, else from the Hub's local cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    online = reachable("model", name)
    try:
        return Path(hf_hub_download(name, "tokenizer.json", etag_timeout=TIMEOUT, local_files_only=not online))
    except LocalEntryNotFoundError as error:
        raise UserError(f"{name!r} is no file here, and the Hub cannot be reached to look for it") from error
    except EntryNotFoundError as error:
        raise UserError(f"the Hub's {name!r} has no tokenizer.json") from error


def _ask(kind: Literal["model", "dataset"], name: str, revision: str | None = None) -> Any:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RevisionNotFoundError,
    )

    api = HfApi()
    ask = api.model_info if kind == "model" else api.dataset_info
    try:
        return ask(name, revision=revision, timeout=TIMEOUT)
    except HFValidationError as error:
        raise UserError(f"{name!r} is no file here and no Hub name (<owner>/<name>)") from error
    except OfflineModeIsEnabled:
        return None
    except RevisionNotFoundError as error:
        raise UserError(f"the Hub's {kind} {name!r} has no revision {revision!r}") from error
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code in (401, 403, 404):
            raise UserError(f"the Hub has no {kind} {name!r}, or not for you") from error
        return None
    except Exception:  # each HTTP library has its own errors for "no network"; all mean the same here
        return None
