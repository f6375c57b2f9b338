"""What S3's refusals mean and what to do about them."""

import errno
from collections.abc import Callable, Sequence

from botocore import exceptions as boto

from trainium.errors import TransientError, UserError

_SHOWN = 10
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_PASSING = frozenset(
    {
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "RequestTimeout",
        "RequestTimeTooSkewed",
        "InternalError",
        "ServiceUnavailable",
    }
)
_KEYS = {
    "InvalidAccessKeyId": "the access key does not exist",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "ExpiredToken": "the temporary credentials have expired",
    "InvalidToken": "the session token is not valid",
    "AuthorizationHeaderMalformed": "the request was signed for another region",
}
_SIGN = (
    "Public data: dataset.unsigned=true. Otherwise put keys that may read it into the S3Storage block, "
    "or run `aws configure`."
)


class FetchError(UserError):
    """The dataset source does not have, or does not give, what the recipe names."""


def listed(names: Sequence[str]) -> str:
    """`There are: a, b.`, at most ten names."""
    if not names:
        return "There is nothing there."
    return "There are: " + ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "") + "."


def explain(
    error: BaseException, bucket: str, key: str, siblings: Callable[[], tuple[str, Sequence[str]]]
) -> FetchError | TransientError | None:
    """The same failure in words that say what to do, or None when it is of no known kind.

    `siblings` lists what is beside the key; it is asked only after a 404 or 403, which
    say nothing more in answer to a HEAD.
    """
    source = f"s3://{bucket}/{key}"
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError | boto.CredentialRetrievalError):
        return FetchError(f"{source}: there are no AWS credentials. {_SIGN}")
    if isinstance(error, boto.ProfileNotFound | boto.InvalidRegionError | boto.ParamValidationError):
        return FetchError(f"{source}: {error}. Correct bucket, key, profile or region.")
    if isinstance(error, boto.ClientError):
        return _answer(error, bucket, key, siblings)
    if isinstance(error, boto.HTTPClientError | boto.ConnectionError | boto.IncompleteReadError | ConnectionError):
        return TransientError(
            f"{source}: no connection to S3, or it broke ({type(error).__name__}). What arrived is kept and a retry "
            "goes on from there. Without internet: fetch the file elsewhere and give its folder as "
            "dataset.source."
        )
    if isinstance(error, OSError) and error.errno in _FULL:
        return FetchError(
            f"{source}: the disk is full ({error.filename or 'while downloading'}). Free space and start again."
        )
    if isinstance(error, OSError) and error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return FetchError(
            f"{source}: cannot write {error.filename}: {error.strerror}. Choose a folder that you may write to."
        )
    return None


def _answer(
    error: boto.ClientError, bucket: str, key: str, siblings: Callable[[], tuple[str, Sequence[str]]]
) -> FetchError | TransientError:
    source = f"s3://{bucket}/{key}"
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code in _PASSING or status >= 500 or status == 429:
        return TransientError(
            f"{source}: S3 answered {status} {code}. What arrived is kept; a retry goes on from there."
        )
    if code in _KEYS:
        return FetchError(f"{source}: {_KEYS[code]} ({code}). {_SIGN}")
    if status == 412:
        return TransientError(f"{source} was replaced during the download. A retry fetches the new version.")
    if status == 404:
        listing, names = siblings()
        if code == "NoSuchBucket" or listing == "NoSuchBucket":
            return FetchError(f"{source}: there is no bucket {bucket!r}. Check the name and the endpoint.")
        return FetchError(f"{source} does not exist. {'' if listing else listed(names)}".rstrip())
    if status == 403:
        listing, names = siblings()
        if not listing and names:
            return FetchError(f"{source}: access denied, though the folder may be listed. {listed(names)} {_SIGN}")
        return FetchError(
            f"{source}: access denied, or no such file: S3 does not tell them apart for who may not list. {_SIGN}"
        )
    if status in {301, 307, 400}:
        return FetchError(
            f"{source}: S3 answered {status} {code}. The bucket is in another region: set the region of the S3Storage "
            "block."
        )
    return FetchError(f"{source}: S3 answered {status} {code}.")
