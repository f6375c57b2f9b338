"""What can go wrong between a job and its scheduler."""


class SlurmError(RuntimeError):
    """Base of all errors of this package; the message says what happened, where, and what to do."""


class InvalidJobSpec(SlurmError, ValueError):
    """A field of a job that Slurm or the shell could misread. Names field, value, rule and what would work."""

    def __init__(self, field: str, value: object, rule: str, instead: str) -> None:
        self.field, self.value, self.rule, self.instead = field, value, rule, instead
        super().__init__(f"job field {field!r} is {value!r}: {rule}; write {instead}")


class SubmitRejected(SlurmError):
    """The scheduler refused the job for good: no job exists. `remedy` is empty where none is known."""

    def __init__(self, text: str, remedy: str = "") -> None:
        self.text, self.remedy = text, remedy
        super().__init__(f"the scheduler refused the job: {text}" + (f" ({remedy})" if remedy else ""))


class SubmitUncertain(SlurmError):
    """The submission may or may not have made a job (a time-out, a lost answer): look its name up before the next."""


class SchedulerUnreachable(SlurmError):
    """The controller, its database or its authentication does not answer. Says nothing about any job."""


class AmbiguousJob(SlurmError):
    """Several jobs carry the unique name of one submission; a human has to choose."""


class BrokenRecord(SlurmError):
    """A record in a job folder that this package wrote cannot be read back."""


class BadHostList(SlurmError, ValueError):
    """A text that should be a list of hosts and is none."""
