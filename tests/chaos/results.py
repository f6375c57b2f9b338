"""What came of the runs, for people and for programs."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Result:
    """One run, its fault, and what came of it."""

    number: int
    fault: str
    moment: str
    struck: bool = True  # False: the flow was done before the moment came
    jobs: int = 0
    attempts: int = 0  # the most that a stage had
    starts: int = 0
    state: str = ""  # of the last flow run, by Prefect
    digest: str = ""
    equal: bool = False  # to the undisturbed run, in the bits of the weights and in every loss
    duplicates: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    folder: str = ""

    @property
    def good(self) -> bool:
        """Nothing is wrong with it."""
        return self.equal and not (self.duplicates or self.orphans or self.wrong)

    def line(self) -> str:
        """Everything of it in one line, and a line for each thing that is wrong."""
        moment = self.moment if self.struck else f"{self.moment} (too late)"
        head = (
            f"{self.number:03d} {self.fault:<22} {moment:<26} jobs {self.jobs:2d}  duplicates {len(self.duplicates)}  "
            f"orphans {len(self.orphans)}  attempts {self.attempts}  starts {self.starts}  {self.state:<10} "
            f"{self.digest[:10] or '-':<10} {'equal' if self.equal else 'UNEQUAL'}  {self.seconds:5.1f} s"
        )
        bad = [*self.duplicates, *(f"orphan: {text}" for text in self.orphans), *self.wrong]
        return "\n".join([head, *(f"      ! {text}" for text in bad), *(f"      - {text}" for text in self.notes)])


def summary(results: Sequence[Result]) -> tuple[str, int]:
    """The last line, and the exit code: 0 only when every number in it but the first is 0."""
    duplicates, orphans = (sum(len(getattr(r, what)) for r in results) for what in ("duplicates", "orphans"))
    wrong, unequal = sum(len(r.wrong) for r in results), sum(not r.equal for r in results)
    text = f"{len(results)} runs, {duplicates} duplicates, {orphans} orphans, {wrong} wrong verdicts, "
    text += f"{unequal} unequal results"
    return text, 0 if results and not (duplicates or orphans or wrong or unequal) else 1
