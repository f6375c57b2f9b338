"""What must not leave a log file: tokens, keys, dumps of the environment, instance ids."""

import re

_SECRET_NAME = (
    r"[A-Za-z0-9_]*(?:TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIAL)(?!S?_PATH)[A-Z0-9_]*"
)
_AWS_NAME = r"(?:aws_?(?:secret_?access_?key|session_?token|access_?key_?id)|SecretAccessKey|SessionToken)"
_IS = r"['\"]?\s*[=:]\s*"
_VALUE = r"(?:'[^'\r\n]*'|\"[^\"\r\n]*\"|(?!\[redacted)[^\s,;'\"]+)"
_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    # The runtime dumps the whole environment; `Failure:` alone says what went wrong.
    (
        re.compile(r"(NRT:nrt_infodump)(?![ \t]*Failure:)(?:(?!NRT:nrt_infodump)[^\r\n])+"),
        r"\1 [redacted: runtime and environment dump]",
    ),
    (re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{8,}"), "[redacted: Hugging Face token]"),
    (re.compile(r"\b(?:AKIA|ASIA|ABIA|ACCA|AROA|AIDA)[A-Z0-9]{12,}\b"), "[redacted: AWS key]"),
    (re.compile(r"(X-Amz-(?:Signature|Credential|Security-Token)=)[^\s&\"']+", re.IGNORECASE), r"\1[redacted]"),
    (
        re.compile(
            rf"(\bAuthorization\b{_IS}['\"]?(?:(?:Bearer|Basic|AWS4-HMAC-SHA256)\s+)?)[^\s'\"][^\r\n'\"]*",
            re.IGNORECASE,
        ),
        r"\1[redacted]",
    ),
    (re.compile(r"(\bBearer\s+)[A-Za-z0-9._~+/=-]{8,}"), r"\1[redacted]"),
    # Environment variables and AWS's own spellings: NAME=value, "NAME": "value", SecretAccessKey: value.
    (re.compile(rf"(\b{_SECRET_NAME}{_IS}){_VALUE}"), r"\1[redacted]"),
    (re.compile(rf"(\b{_AWS_NAME}{_IS}){_VALUE}", re.IGNORECASE), r"\1[redacted]"),
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@:'\"]*:[^\s/@'\"]+@", re.IGNORECASE), r"\1[redacted]@"),
    (re.compile(r"(?<![\w.])i-[0-9a-f]{8}(?:[0-9a-f]{9})?\b"), "[redacted: instance id]"),
)


def redact(text: str) -> str:
    """The text without secrets and without what identifies a machine; applying it twice changes nothing more."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text
