"""The one base of every failure that a retry may mend."""


class TransientError(RuntimeError):
    """The other side or the network failed, not the request: the same call may succeed later and keeps what is done."""
