"""Upload a model to the Hugging Face Hub: one commit, of what belongs to the model and no more.

A training run's folder holds more than a model (states to go on from, metrics); that stays here.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HfHubHTTPError

from .checkpoint_files import CONFIG, INDEX, OFFICIAL, SINGLE, read_index, read_json
from .hub import read_config
from .models.lm import Mamba3LM
from .remote import CARD, LIBRARY, SMALL_FILES, HTTPError, explained, http_error

if TYPE_CHECKING:
    from .data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MESSAGE = "Upload model with mamba3"
# Seconds before the first, second, ... further try of an upload that broke off.
WAITS_S = (1, 2, 4, 8)
# Answers after which another try may succeed: too many requests, and failures of the server.
PASSING = (429, 500, 502, 503, 504)


def push_to_hub(
    folder_or_model: str | os.PathLike[str] | Mamba3LM,
    repo_id: str,
    *,
    private: bool | None = None,
    branch: str | None = None,
    create_pr: bool = False,
    replace_card: bool = False,
    token: str | bool | None = None,
    message: str = MESSAGE,
    tokenizer: Tokenizer | None = None,
    max_shard_size: int | str = "5GB",
) -> str:
    """Upload a model to the Hub in one commit; the repository is made if there is none.

    Of a folder go config.json, the safetensors and their index, the tokenizer's files,
    generation_config.json, README.md, LICENSE and the code that config.json names; nothing else.

    Args:
        folder_or_model: a folder as `save_pretrained` and training write it, or a model, which is
            saved to a temporary folder first.
        repo_id: org/name; a name alone is of the account that is logged in.
        private: whether a new repository is private; None takes the account's default. One that is
            there already stays as it is.
        branch: to commit to, made if needed; None is the main branch.
        create_pr: open a pull request instead.
        replace_card: replace a README.md that the repository has already; it is kept otherwise.
        token: of the Hub; None takes the one that is logged in.
        message: of the commit.
        tokenizer: of a model, saved beside it. A folder has its own.
        max_shard_size: of a weights file of a model, in bytes or as "5GB".

    Returns:
        The address of the repository, of the branch in it, or of the pull request.

    Raises:
        FileNotFoundError: no such folder, or no model in it; no such repository on the Hub.
        PermissionError: the Hub does not know the token, or it may not write there.
        OSError: the Hub cannot be reached, or failed again and again.
        ValueError: a folder that could not be loaded again; a branch and a pull request at once.
    """
    if create_pr and branch is not None:
        raise ValueError(f"a pull request is against the main branch: leave out branch={branch!r}")
    options = {"private": private, "branch": branch, "create_pr": create_pr, "message": message}
    options |= {"replace_card": replace_card, "token": token}
    if not isinstance(folder_or_model, Mamba3LM):
        if tokenizer is not None:
            raise ValueError("a tokenizer goes with a model; a folder has its own: save it there")
        return _push_folder(Path(folder_or_model), repo_id, **options)
    with tempfile.TemporaryDirectory(prefix="mamba3-push-") as folder:
        folder_or_model.save_pretrained(folder, tokenizer=tokenizer, max_shard_size=max_shard_size)
        return _push_folder(Path(folder), repo_id, **options)


def files_to_push(folder: str | os.PathLike[str]) -> list[str]:
    """Names of the files of a folder that `push_to_hub` uploads, sorted.

    Raises:
        FileNotFoundError: no such folder, no config.json or no weights in it.
        ValueError: files that are no model; weights that are a pickle alone.
    """
    folder = Path(folder)
    read_config(folder)
    if (folder / SINGLE).is_file():
        weights = {SINGLE}
    elif (folder / INDEX).is_file():
        weights = {INDEX, *read_index(folder / INDEX)}
    elif (folder / OFFICIAL).is_file():
        raise ValueError(
            f"{folder} has its weights as a pickle, {OFFICIAL}, which nobody should have to load: "
            f"write them as safetensors first, Mamba3LM.from_pretrained({str(folder)!r})"
            ".save_pretrained('another-folder')"
        )
    else:
        raise FileNotFoundError(f"{folder} holds no weights: expected {SINGLE} or {INDEX}")
    if missing := sorted(name for name in weights if not (folder / name).is_file()):
        raise FileNotFoundError(f"{folder / INDEX} lists {', '.join(missing)}, missing there")
    others = {*SMALL_FILES, *_code(folder / CONFIG)}
    return sorted(weights | {name for name in others if (folder / name).is_file()})


def _code(config: Path) -> set[str]:
    """The Python files that a config.json names for transformers' trust_remote_code."""
    auto_map = read_json(config).get("auto_map")
    names = auto_map.values() if isinstance(auto_map, dict) else ()
    found = [re.fullmatch(r"(\w+)\.\w+", name) for name in names if isinstance(name, str)]
    return {f"{match[1]}.py" for match in found if match}


def _push_folder(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None,
    branch: str | None,
    create_pr: bool,
    replace_card: bool,
    token: str | bool | None,
    message: str,
) -> str:
    files = files_to_push(folder)
    api = HfApi(token=token, **LIBRARY)
    with explained(repo_id, branch):
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if branch is not None:
            api.create_branch(repo_id, branch=branch, exist_ok=True)
        if CARD in files and not replace_card and api.file_exists(repo_id, CARD, revision=branch):
            files.remove(CARD)
        commit = _with_patience(
            lambda: api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=branch,
                create_pr=create_pr,
                commit_message=message,
                allow_patterns=[glob.escape(name) for name in files],
            ),
            # With the answer lost, a pull request may be there, and another try would make two.
            waits=() if create_pr else WAITS_S,
        )
    if create_pr:
        return commit.pr_url
    page = f"{api.endpoint}/{repo_id}"
    return page if branch is None else f"{page}/tree/{branch}"


def _with_patience(upload: Callable[[], CommitInfo], waits: tuple[float, ...]) -> CommitInfo:
    """Try an upload again when the connection breaks or the Hub fails, after longer and longer.

    What has arrived is not sent again, and files that a lost answer was about are found unchanged.
    """
    for wait in waits:
        try:
            return upload()
        except (HTTPError, RuntimeError) as error:
            cause = http_error(error)
            is_answer = isinstance(cause, HfHubHTTPError)
            if cause is None or (is_answer and cause.response.status_code not in PASSING):
                raise
            logger.warning("the upload broke off (%s); trying again in %g s", cause, wait)
            time.sleep(wait)
    return upload()
