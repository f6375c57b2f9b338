"""A tensor as a matrix of which some rows at a time are read, whatever files its pieces lie in."""

from dataclasses import dataclass

from trainium.checkpoint.assembly import read_ahead
from trainium.checkpoint.statistics import largest_difference, same_bits
from trainium.checkpoint.weights import Raw


@dataclass(frozen=True)
class Held:
    """A view of a piece in one file. rank: (tp rank, pp rank), where files have ranks."""

    raw: Raw
    dtype: str
    file: str
    rank: tuple[int, int] = (0, 0)

    @property
    def matrix(self) -> Raw:
        """One number per row where there are no columns."""
        return self.raw.reshape(len(self.raw) if self.raw.ndim else 1, -1) if self.raw.size else self.raw.reshape(0, 1)


@dataclass(frozen=True)
class Piece:
    """Rows (dim 0) or columns (dim 1) `start:stop` of a tensor, or all of it (None), `held` by one or several files."""

    dim: int | None
    start: int
    stop: int
    held: tuple[Held, ...]

    def place(self, start: int, stop: int) -> tuple[slice, slice]:
        """Rows `start:stop` of the tensor: which rows of this piece, and which of those asked for, they are."""
        if self.dim != 0:
            return slice(start, stop), slice(0, stop - start)
        first = max(start, self.start)
        last = max(first, min(stop, self.stop))
        return slice(first - self.start, last - self.start), slice(first - start, last - start)


@dataclass(frozen=True)
class CopyFound:
    """A copy of numbers that is not equal to the first, and by how much."""

    file: str
    rank: tuple[int, int]
    largest: float


@dataclass(frozen=True)
class Rows:
    """A tensor in pieces that do not overlap and leave nothing out."""

    pieces: tuple[Piece, ...]

    def ahead(self, start: int, stop: int) -> None:
        """Have the disk begin to read those rows, copies included."""
        for piece in self.pieces:
            rows, _ = piece.place(start, stop)
            for held in piece.held:
                read_ahead(held.matrix[rows])

    def read(self, start: int, stop: int, buffer: Raw) -> Raw:
        """Those rows: a view of a file where one holds them all, else `buffer`, which has their shape."""
        for piece in self.pieces:
            rows, into = piece.place(start, stop)
            if piece.dim != 1 and into == slice(0, stop - start):
                return piece.held[0].matrix[rows]
            columns = slice(piece.start, piece.stop) if piece.dim == 1 else slice(None)
            buffer[into, columns] = piece.held[0].matrix[rows]
        return buffer

    def copies(self, start: int, stop: int) -> list[CopyFound]:
        """The copies of those rows that are not equal to the first."""
        wrong = []
        for piece in self.pieces:
            rows, _ = piece.place(start, stop)
            first, *others = piece.held
            for other in others:
                if not same_bits(first.matrix[rows], other.matrix[rows]):
                    largest = largest_difference(first.matrix[rows], other.matrix[rows], first.dtype)
                    wrong.append(CopyFound(other.file, other.rank, largest))
        return wrong

    def file(self, row: int, column: int) -> str:
        """Name of the file that holds a number."""
        for piece in self.pieces:
            if piece.dim is None or piece.start <= (row, column)[piece.dim] < piece.stop:
                return piece.held[0].file
        raise IndexError((row, column))
