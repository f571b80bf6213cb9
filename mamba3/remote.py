"""Models on the Hugging Face Hub: downloads, and what to do when the Hub refuses.

Cache, offline mode, endpoint and stored token are those of huggingface_hub: HF_HOME,
HF_HUB_OFFLINE, HF_ENDPOINT, `hf auth login`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants, errors, snapshot_download

from . import __version__
from .checkpoint_files import CONFIG, GENERATION, INDEX, OFFICIAL, SINGLE, read_json
from .config import A_ACTIVATIONS, Mamba3Config

LIBRARY = {"library_name": "mamba3", "library_version": __version__}

CARD = "README.md"
# What stands beside the weights, of ours and of the transformers library.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
SMALL_FILES = (CONFIG, GENERATION, CARD, "LICENSE", *TOKENIZER_FILES)
SAFETENSORS = (SINGLE, INDEX, "model*-of-*.safetensors")

# The HTTP library's class of all its errors: which library that is depends on the version.
HTTPError = errors.HfHubHTTPError.__mro__[1]
OFFLINE = (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)


def download(
    repo_id: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> Path:
    """Download what a model needs of a repository into the Hub's cache, and return the folder.

    Weights are downloaded of models in a form of `mamba3.forms` only, and the pickle only where
    there are no safetensors.

    Args:
        repo_id: org/name.
        revision: branch, tag or commit; None is the main branch.
        token: None takes the stored one, False none.
        local_files_only: ask the Hub nothing.

    Raises:
        FileNotFoundError: no such repository or revision, or, without the Hub, not in the cache.
        PermissionError: the Hub refuses it to this user.
        OSError: the Hub cannot be reached, or fails.
    """

    def fetch(patterns: tuple[str, ...], commit: str | None) -> Path:
        return Path(
            snapshot_download(
                repo_id,
                revision=commit,
                token=token,
                local_files_only=local_files_only,
                allow_patterns=list(patterns),
                **LIBRARY,
            )
        )

    with explained(repo_id, revision):
        folder = fetch(SMALL_FILES, revision)
        if _is_ours(folder / CONFIG):
            commit = folder.name  # a push in between must not mix two commits
            fetch(SAFETENSORS, commit)
            if not any((folder / name).is_file() for name in (SINGLE, INDEX)):
                fetch((OFFICIAL,), commit)
    return folder


def _is_ours(file: Path) -> bool:
    """Whether a config.json is of a model that there is here."""
    try:
        # What is left open changes no tensor.
        Mamba3Config.from_dict(read_json(file), a_activation=A_ACTIVATIONS[0])
    except (OSError, TypeError, ValueError):
        return False
    return True


@contextlib.contextmanager
def explained(repo_id: str, revision: str | None = None) -> Iterator[None]:
    """Turn the Hub's errors into ones that name the repository and say what to do."""
    try:
        yield
    except (HTTPError, OSError, RuntimeError) as error:
        cause = http_error(error)
        if cause is None and not isinstance(error, OFFLINE):
            raise
        is_download = isinstance(error, errors.LocalEntryNotFoundError)
        raise _explain(cause or error, repo_id, revision, is_download) from error


def http_error(error: Exception) -> Exception | None:
    """The HTTP library's error that an error is or comes from, if it does.

    huggingface_hub wraps them, as RuntimeError for a file that it could not upload, and as a file
    that is not in the cache for a download that failed.
    """
    return next((e for e in (error, error.__cause__) if isinstance(e, HTTPError)), None)


def _explain(error: Exception, repo_id: str, revision: str | None, is_download: bool) -> OSError:
    page = f"{constants.ENDPOINT}/{repo_id}"
    log_in = "log in with `hf auth login`, or pass a token that may do this"
    if isinstance(error, errors.GatedRepoError):
        return PermissionError(
            f"{repo_id} is gated: accept its conditions on {page} with your account, then {log_in}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return FileNotFoundError(f"{repo_id} has no revision {revision!r}: see {page}/commits/main")
    if isinstance(error, errors.RepositoryNotFoundError):
        return FileNotFoundError(
            f"there is no {repo_id} on {constants.ENDPOINT}, or it is private: check the name; for "
            f"a private one, {log_in}"
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    said = getattr(error, "server_message", None) or _first_line(error)
    if status == 401:
        return PermissionError(
            f"the Hub knows no such token, or needs one, for {repo_id}: {log_in}"
        )
    if status == 403:
        return PermissionError(
            f"this account or token may not do that with {repo_id} ({said}): take a repository of "
            "your own, ask its owner for access, or give the token the right to write"
        )
    if status == 404:
        return FileNotFoundError(f"the Hub finds nothing for {repo_id} ({said}): check the name")
    if status == 409:
        return FileExistsError(
            f"{repo_id} was changed by another at the same time ({said}): try again"
        )
    if status is not None:
        return OSError(f"the Hub failed for {repo_id} with status {status} ({said}): try later")
    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set, so the Hub was not asked: unset it"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        why = "the Hub was not asked, or cannot be reached: allow it (local_files_only=False)"
    else:
        why = f"{constants.ENDPOINT} cannot be reached ({said}): check the network, or name a "
        why += "mirror in HF_ENDPOINT"
    if not is_download:
        return ConnectionError(f"{repo_id}: {why}")
    return FileNotFoundError(
        f"{repo_id}, revision {revision or 'main'}, is not wholly in the cache, and {why}, or give "
        "the folder of a copy"
    )


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
