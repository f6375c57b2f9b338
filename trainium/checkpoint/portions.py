"""What a conversion is divided into: the tensors of its output files, with the way to each."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from trainium.checkpoint.archive_writer import tensors_image
from trainium.checkpoint.assembly import read_ahead, slice_of, slices
from trainium.checkpoint.formats import Form
from trainium.checkpoint.huggingface import SafetensorsImage, file_order
from trainium.checkpoint.placement import Target
from trainium.checkpoint.shards import shard_images
from trainium.checkpoint.transfer import Done, Loaded, OutputFile, Portion, Record, Transfer, sync
from trainium.checkpoint.weights import TensorInfo, Weights
from trainium.checkpoint.workers import Work, spread
from trainium.checkpoint.workspace import Workspace

_PORTION_BYTES = 1 << 27
_SAMPLED_BLOCKS = 512  # of all files of an input together
_SAMPLE_BYTES = 4096
_END_BYTES = 1 << 16


def rank_portion(
    weights: Weights, targets: Sequence[Target], info: Mapping[str, TensorInfo], name: str, form: Form, asked: set[str]
) -> Portion:
    """One rank: a portion that closes all of its files. asked: tensors that the disk was asked for, by any rank."""
    files = tuple(OutputFile(file, image) for file, image in shard_images(name, info, form).items())
    places = ((file, index) for file in files for index in range(len(file.image.offsets)))

    def load(target: Target) -> Loaded:
        stored = weights.info[target.cuts[0].source].dtype
        return Loaded(slices(weights, target).blocks(stored, info[target.name].dtype))

    def ahead(target: Target) -> None:
        for cut in target.cuts:
            if cut.dim == 0 or cut.source not in asked:  # columns are spread over the whole tensor, for every rank
                read_ahead(slice_of(weights.raw(cut.source), cut))
                asked.add(cut.source)

    records = tuple(
        Record(file, index, info[target.name].bytes, partial(load, target), partial(ahead, target))
        for (file, index), target in zip(places, targets, strict=True)
    )
    return Portion(name, records, files)


def file_portions(
    name: str, info: Mapping[str, TensorInfo], load: Callable[[str], Loaded], ahead: Callable[[str], None]
) -> list[Portion]:
    """Neighbouring tensors of one file; the file is closed when all of them are there."""
    ordered = info if name.endswith(".pt") else file_order(info)
    image = tensors_image(Path(name).stem, ordered) if name.endswith(".pt") else SafetensorsImage(ordered)
    file = OutputFile(name, image)
    groups: list[list[Record]] = [[]]
    for index, (tensor, item) in enumerate(ordered.items()):
        if sum(record.size for record in groups[-1]) >= _PORTION_BYTES:
            groups.append([])
        groups[-1].append(Record(file, index, item.bytes, partial(load, tensor), partial(ahead, tensor)))
    return [Portion(f"{name}:{group[0].index}", tuple(group)) for group in groups]


def write_all(
    space: Workspace, items: Sequence[Sequence[Portion]], workers: int, moved: Callable[[int], None]
) -> dict[str, Done]:
    """Write portions, those of an item together; each is in the workspace's journal when it is on the disk."""
    written: dict[str, Done] = {}

    def finished(item: Sequence[Portion], done: dict[str, Done]) -> None:
        written.update(done)
        space.record(done)

    def do(item: Sequence[Portion], moved: Callable[[int], None]) -> dict[str, Done]:
        with closing(Transfer(space.folder, moved)) as transfer:
            return transfer.write(item, space.done)

    work = Work[Sequence[Portion], dict[str, Done]](do, settle=lambda item: sync(space.folder, item))
    spread(work, items, workers, moved=moved, finished=finished)
    return written


def close_all(folder: Path, portions: Sequence[Portion], done: Mapping[str, Done]) -> None:
    """Complete the files that several portions made."""
    for file in {record.file.name: record.file for portion in portions for record in portion.records}.values():
        records = tuple(r for portion in portions for r in portion.records if r.file.name == file.name)
        whole = Portion(file.name, records, (file,))
        crcs = [
            crc for portion in portions if portion.records[0].file.name == file.name for crc in done[portion.key].crcs
        ]
        with closing(Transfer(folder, lambda size: None)) as transfer:
            transfer.close_files(whole, crcs)
        sync(folder, [whole])


def sizes(portions: Iterable[Portion]) -> dict[str, int]:
    """Name → bytes of all files."""
    return {name: file.image.size for portion in portions for name, file in portion.files.items()}


def identity(files: Sequence[Path]) -> list[tuple[str, int, int, str]]:
    """By what a file is known to be the same, on every node; a checkpoint's files are not written to any more.

    Copies of other models can have the same size and time, so blocks of the content count too: both ends, where
    headers and checksums are, and some between, few enough to cost milliseconds.
    """
    blocks = max(4, _SAMPLED_BLOCKS // max(1, len(files)))
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns, _sample(path, blocks)) for path in files]


def _sample(path: Path, blocks: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        inner = [size * number // blocks for number in range(1, blocks)]
        ends = [(0, _END_BYTES), (max(0, size - _END_BYTES), _END_BYTES)]
        for start, length in (*ends, *((start, _SAMPLE_BYTES) for start in inner)):
            digest.update(os.pread(file.fileno(), length, start))
    return digest.hexdigest()
