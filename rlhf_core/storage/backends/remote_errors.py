"""What an error of a remote store means: try again, renew the credentials, or give up, and with which advice.

An s3fs error is an ``OSError`` of its own making; what the server said is the ``response`` of its cause.
"""

from __future__ import annotations

import errno
from typing import Any

_PERMANENT = (PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError, TypeError, ValueError)
_NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "SSOTokenLoadError",
    "UnauthorizedSSOTokenError",
    "TokenRetrievalError",
}
_PERMANENT_NAMES = {"ParamValidationError", "ConfigParseError", "ConfigNotFound", "InvalidConfigError"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
# Answers of kind "your fault" that are nobody's: bytes altered on the way, a body that came too slowly, two creates at once.
_PASSING_CODES = {
    "BadDigest",
    "XAmzContentSHA256Mismatch",
    "IncompleteBody",
    "RequestTimeout",
    "ConditionalRequestConflict",
}
_PASSING_STATUS = {408, 409, 425, 429}


def is_permanent(error: BaseException) -> bool:
    """True if another attempt cannot help."""
    if code_of(error) in _PASSING_CODES:
        return False
    status = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    client_fault = 400 <= status < 500 and status not in _PASSING_STATUS
    name = type(error).__name__
    refused = client_fault or status == 501 or isinstance(error, _PERMANENT)
    return refused or name in _PERMANENT_NAMES or name in _NO_CREDENTIALS


def is_expired(error: BaseException) -> bool:
    """True if the credentials were good once: newer ones may be had where these came from."""
    return code_of(error) in _EXPIRED


def is_precondition_failed(error: BaseException) -> bool:
    """True if the store refused a create because the object exists (s3fs makes EINVAL of HTTP 412)."""
    if isinstance(error, FileExistsError) or code_of(error) == "PreconditionFailed":
        return True
    return isinstance(error, OSError) and error.errno == errno.EINVAL and "pre-condition" in str(error).lower()


def is_missing_bucket(error: BaseException) -> bool:
    """True if not the object is missing, but all that it could lie in."""
    return code_of(error) == "NoSuchBucket"


def code_of(error: BaseException) -> str:
    """The server's own name of the error; empty if it did not answer."""
    return str(_response(error).get("Error", {}).get("Code", ""))


def reason(error: BaseException, place: str) -> str:
    """The error in words, and what to do about it.

    Args:
        error: of the last attempt.
        place: the server that was asked.
    """
    text = f"{type(error).__name__}: {str(error) or f'no answer from {place}'}"
    if is_expired(error):
        return f"{text}; renew the credentials, or use a source that renews them (a role, credential_process)"
    if type(error).__name__ in _NO_CREDENTIALS:
        return (
            f"{text}; give this process credentials: in its environment (AWS_ACCESS_KEY_ID …, AWS_PROFILE) or by a role. The "
            "processes of the local stack have the environment of `rlhf up`"
        )
    if isinstance(error, PermissionError):
        return f"{text}; check the credentials in the environment and what they are allowed to do in {place}"
    if code_of(error) == "NotImplemented":
        return f"{text}; {place} lacks what the log of a run needs: use a store that docs/storage.md names"
    return text


def _response(error: BaseException) -> dict[str, Any]:
    for found in (error, error.__cause__, error.__context__):
        response = getattr(found, "response", None)
        if isinstance(response, dict):
            return response
    return {}
