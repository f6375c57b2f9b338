"""Python tracebacks, condensed to exception, message and the frame that matters."""

import re
from dataclasses import dataclass, field

from trainium.logs.tail import decode

# srun --label, MPI and torchrun put these before every line of a rank.
_LABEL = re.compile(r"^(?:\s*\d+: |\[\d+,\d+\]<std(?:out|err)>:\s?|\[(?:default|rank)?\d+\]:\s?)+")
_START = "Traceback (most recent call last)"
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>\S+))?')
_END = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt|Warning|Failure|Timeout|Expired"
    r"|Refused|Iteration|Abort|Group)|(?:[A-Za-z_]\w*\.)+[A-Z]\w*)(?::\s?(?P<message>.*))?$"
)
_LONGEST = 400
_MOST_OPEN = 64
_NXD = ("neuronx_distributed_training", "neuronx-distributed-training", "neuronx_distributed")


@dataclass(frozen=True)
class PythonError:
    """The end of one traceback.

    Attributes:
        type: the exception's name, with its module where it was printed.
        message: the first line of its message.
        frame: `file:line in function` of the innermost frame in the user's or NxD's code, else of the innermost one.
    """

    type: str
    message: str
    frame: str

    def __str__(self) -> str:
        where = f" (at {self.frame})" if self.frame else ""
        return f"{self.type}: {self.message[:300]}{where}" if self.message else f"{self.type}{where}"


@dataclass
class _Open:
    frames: list[tuple[str, str, str]] = field(default_factory=list)
    lines: int = 0


def _is_ours(file: str) -> bool:
    if any(part in file for part in _NXD):
        return True
    return not re.search(r"/(?:site|dist)-packages/|/lib/python3|^<frozen", file)


class Tracebacks:
    """Follows tracebacks line by line, one per rank label; a line of another rank in between disturbs nothing."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def line(self, raw: bytes) -> PythonError | None:
        """Take one line; the error when a traceback ends here."""
        text = decode(raw).rstrip()
        match = _LABEL.match(text)
        label = match.group().strip() if match else ""
        body = text[match.end() :] if match else text
        if _START in body:
            if len(self._open) < _MOST_OPEN:
                self._open[label] = _Open()
            return None
        current = self._open.get(label)
        if current is None:
            return None
        current.lines += 1
        if frame := _FRAME.search(body):
            current.frames.append((frame["file"], frame["line"], frame["function"] or ""))
            del current.frames[:-50]
        elif current.frames and (end := _END.match(body)):
            del self._open[label]
            return PythonError(end["type"], (end["message"] or "").strip(), self._frame(current.frames))
        if current.lines > _LONGEST:
            del self._open[label]
        return None

    @staticmethod
    def _frame(frames: list[tuple[str, str, str]]) -> str:
        ours = [frame for frame in frames if _is_ours(frame[0])]
        file, line, function = (ours or frames)[-1]
        return f"{file}:{line} in {function}" if function else f"{file}:{line}"
