"""Questions to the Hugging Face Hub that end within seconds where there is no network.

Its own client retries a failed look-up for 23 s (huggingface_hub 1.x), twice for a data set.
"""

from pathlib import Path
from typing import Literal

from src.errors import UserError

TIMEOUT = 5.0  # seconds


def reachable(kind: Literal["model", "dataset"], name: str) -> bool:
    """Whether the Hub answers, asked once. False without a network, or where HF_HUB_OFFLINE is set.

    Raises UserError where the Hub answers that it has no such repository (or not for this user).
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    api = HfApi()
    ask = api.model_info if kind == "model" else api.dataset_info
    try:
        ask(name, timeout=TIMEOUT)
    except HFValidationError as error:
        raise UserError(f"{name!r} is no file here and no Hub name (<owner>/<name>)") from error
    except OfflineModeIsEnabled:
        return False
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code in (401, 403, 404):
            raise UserError(f"the Hub has no {kind} {name!r}, or not for you") from error
        return False
    except Exception:  # each HTTP library has its own errors for "no network"; all mean the same here
        return False
    return True


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
