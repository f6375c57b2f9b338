"""Three kinds of failure: the user can mend it, the work went wrong, or the same call may succeed later."""


class UserError(ValueError):
    """Something the user wrote or prepared does not work.

    The message is complete on its own: what, where, why, and what to write instead. The command line prints it
    without a traceback and exits with 2.
    """


class StageFailed(RuntimeError):
    """A stage's work was done and went wrong. The message says where it happened and what is known of the cause."""


class TransientError(RuntimeError):
    """The other side or the network failed, not the request: the same call may succeed later and keeps what is done."""
