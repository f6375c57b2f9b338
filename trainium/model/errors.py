"""What can go wrong between here and the hub, sorted by who can mend it."""

import errno
import json

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import (
    DisabledRepoError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from trainium.errors import TransientError, UserError

HUB = "https://huggingface.co"
_RETRYABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class HubError(UserError):
    """The hub refuses, or does not have, what the recipe asks for; or the disk cannot take it."""


def explain(
    error: BaseException, *, repo: str, revision: str, endpoint: str | None, token: str | None
) -> HubError | TransientError | None:
    """The same failure in words that say what to do, or None when it is not one of the known kinds.

    No library text is passed on except the hub's own one-line answer to a refusal, with the token cut out of it.
    """
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        # huggingface_hub wraps what really happened in "cannot find the file locally".
        error = error.__cause__
    where = (endpoint or constants.ENDPOINT).rstrip("/")
    page = f"{where}/{repo}"
    if isinstance(error, HFValidationError):
        return HubError(
            f"model {repo!r} is not the name of a hub repository: write owner/name, for example "
            "weblab-GENIAC/Tanuki-8B-dpo-v1.0, or give a local folder as model.source."
        )
    if isinstance(error, OfflineModeIsEnabled):
        return HubError(
            f"model {repo}: HF_HUB_OFFLINE is set, so nothing can be asked of {where}. Unset it, or give a local "
            "folder as model.source."
        )
    if isinstance(error, GatedRepoError):
        return HubError(_gated(page, error, token))
    if isinstance(error, RepositoryNotFoundError):
        return HubError(_missing(repo, where, token))
    if isinstance(error, RevisionNotFoundError):
        return HubError(
            f"model {repo} has no revision {revision!r}. Set model.revision to a branch, a tag or a full commit "
            f"id from {page}/commits, or to main for the newest."
        )
    if isinstance(error, RemoteEntryNotFoundError):
        return HubError(
            f"model {repo}: {where} lists a file at {revision} but does not have it. See {page}/tree/{revision}."
        )
    if isinstance(error, DisabledRepoError):
        return HubError(
            f"model {repo} was disabled on {where}: nobody can download it. Choose another model; see {page}."
        )
    if isinstance(error, HfHubHTTPError):
        return _status(error, repo, where, token)
    if isinstance(error, FileMetadataError | json.JSONDecodeError):
        return HubError(
            f"model {repo}: {where} does not answer as a Hugging Face hub. Check the endpoint (HF_ENDPOINT), and "
            "whether a proxy or log-in page answers in its place."
        )
    if isinstance(error, httpx2.InvalidURL | httpx2.UnsupportedProtocol):
        return HubError(f"{endpoint!r} is not the address of a hub: write it like {HUB}.")
    if isinstance(error, httpx2.TransportError | ConnectionError | TimeoutError):
        return TransientError(
            f"model {repo}: no connection to {where} ({type(error).__name__}). Finished files are kept and a retry "
            "goes on from there. A machine without internet needs a proxy (HTTPS_PROXY), a mirror (HF_ENDPOINT), or "
            "the model as a local folder (model.source)."
        )
    if isinstance(error, OSError) and error.errno in _FULL:
        return HubError(
            f"model {repo}: the disk is full ({error.filename or 'while downloading'}). Free space and start again."
        )
    if isinstance(error, PermissionError) or (isinstance(error, OSError) and error.errno == errno.EROFS):
        return HubError(
            f"model {repo}: cannot write {error.filename}: {error.strerror}. Choose a folder that you may write to."
        )
    if isinstance(error, OSError) and "Consistency check failed" in str(error):
        return TransientError(
            f"model {repo}: {where} ended a file too early. Finished files are kept; a retry goes on from there."
        )
    return None


def _gated(page: str, error: GatedRepoError, token: str | None) -> str:
    ask = f"Open {page}, accept its terms and wait until access is granted"
    if error.response.status_code == 401 or token is None:
        return (
            f"{page} is gated and no valid token was sent. {ask}; then put an access token ({HUB}/settings/tokens, "
            "read) into the HuggingFaceHub block, or run `hf auth login`."
        )
    return (
        f"{page} is gated and the account of this token is not on its list. {ask}, with the same account; a "
        "fine-grained token also needs 'Read access to contents of all public gated repos you can access'."
    )


def _missing(repo: str, where: str, token: str | None) -> str:
    hidden = (
        "If it is private, put a token that may read it into the HuggingFaceHub block or run `hf auth login`."
        if token is None
        else "If it is private, the token sent may not read it: check its account and permissions."
    )
    return f"model {repo} is not on {where}. Check the spelling (owner/name, capitals count). {hidden}"


def _status(error: HfHubHTTPError, repo: str, where: str, token: str | None) -> HubError | TransientError:
    status = error.response.status_code
    if status in _RETRYABLE_STATUS:
        return TransientError(
            f"model {repo}: {where} answered {status}, a passing trouble. Finished files are kept; try again later."
        )
    said = redact(error.response.headers.get("x-error-message", "").strip(), token)
    answer = f"{where} answered {status}" + (f": {said}" if said else "")
    if status == 401:
        return HubError(
            f"model {repo}: {answer}. The token is wrong, expired or revoked: make a new one at {HUB}/settings/tokens "
            "and put it into the HuggingFaceHub block, or run `hf auth login`."
        )
    if status == 403:
        return HubError(
            f"model {repo}: {answer}. The token may not read this repository: check its permissions at "
            f"{HUB}/settings/tokens."
        )
    return HubError(f"model {repo}: {answer}.")


def redact(text: str, token: str | None) -> str:
    """The text without the token, whatever a server echoed."""
    return text.replace(token, "[token]") if token else text
