"""Upload an exported folder to the Hugging Face Hub.

    check_push("me/planner");   export(run, folder);   url = push_folder(folder, "me/planner", private=True)

As everywhere in huggingface_hub, the token is that of `HF_TOKEN` or `hf auth login`, and `HF_ENDPOINT` names another
hub.
"""

import os
import re
from pathlib import Path
from typing import Any

from flowgrpo.types import BadInput, first_line

REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
WITHOUT_TOKEN = "set HF_TOKEN to a token that may write, or call `hf auth login`"


def check_push(repository: str) -> None:
    """Raise `BadInput` if `repository` is not USER/NAME, or there is no token; call it before writing anything."""
    from huggingface_hub import get_token

    if not REPOSITORY.fullmatch(repository):
        raise BadInput(f"--push_to_hub={repository} must be USER/NAME, a repository of the hub")
    if get_token() is None:
        raise BadInput(f"--push_to_hub={repository} needs a token, and there is none here: {WITHOUT_TOKEN}")


def push_folder(folder: Path, repository: str, *, private: bool, message: str, api: Any = None) -> str:
    """Upload a folder to a repository of the hub, which is created if it does not exist -> its URL.

    Args:
        folder: to upload.
        repository: USER/NAME.
        private: whether a repository that is created is private.
        message: of the commit.
        api: a `huggingface_hub.HfApi`; by default that of the hub that the environment names.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT")) if api is None else api
    try:
        url = api.create_repo(repository, private=private, repo_type="model", exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, repo_type="model", commit_message=message)
    except Exception as error:  # no token, no permission, no network, no space: each has its own class
        raise BadInput(
            f"--push_to_hub={repository}: {_reason(error)}; {folder} is written, and the same command tries again"
        ) from error
    return str(url)


def _reason(error: Exception) -> str:
    """The cause of an error, and the fix if it is known."""
    from huggingface_hub.errors import HfHubHTTPError

    if not isinstance(error, HfHubHTTPError):  # what the transport raises is another library's from version to version
        return f"the hub can't be reached ({first_line(error)}): go online"
    if error.response.status_code == 401:
        return f"the hub does not know the token: {WITHOUT_TOKEN}"
    if error.response.status_code == 403:
        return "the token may not write there: take one that may, or a repository of your own"
    return f"the hub refuses the folder ({first_line(error)})"
