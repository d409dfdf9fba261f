"""Storage and planners for ``torch.distributed.checkpoint``: a safetensors file per rank, nothing pickled on disk.

torch's planners decide who writes and who reads which box; replicated boxes are written once. torch's own storages are not used:
``FileSystemWriter`` pickles its metadata, ``HuggingFaceStorageWriter`` holds a rank's whole share in memory and loses all boxes of
a tensor but one where a rank has several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from meshwright.runtime.checkpoint.catalogue import Catalogue, Place, SavedTensor, check_places
from meshwright.runtime.checkpoint.pieces import Piece
from meshwright.runtime.checkpoint.together import Group
from meshwright.runtime.tensor_files import Entry, FileRecord, TensorFile, write_tensors


@dataclass(frozen=True)
class Written:
    """Where a box went: file, key in it, and the file's record."""

    file: str
    key: str
    record: FileRecord


# --- saving -------------------------------------------------------------------------------------------------------


class PieceSavePlanner(DefaultSavePlanner):
    """torch's planner over :class:`Piece`; a box that several ranks hold is written by the one with least to write."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return super().create_global_plan(shared_out(all_plans))

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        piece: Piece = self.state_dict[index.fqn]
        assert index.offset is not None
        return piece.view(index.offset)


def shared_out(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Every box in one plan only: first those that one rank alone holds, then the largest to the rank with least so far."""
    holders: dict[MetadataIndex, list[int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
    items = {item.index: item for plan in plans for item in plan.items}
    load, writer = [0] * len(plans), {}
    for index in sorted(holders, key=lambda i: (len(holders[i]) > 1, -_bytes(items[i]), i.fqn, i.offset or ())):
        rank = min(holders[index], key=lambda r: (load[r], r))
        writer[index] = rank
        load[rank] += _bytes(items[index])
    return [replace(p, items=[i for i in p.items if writer[i.index] == rank]) for rank, p in enumerate(plans)]


def _bytes(item: WriteItem) -> int:
    data = item.tensor_data
    assert data is not None
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


class PieceWriter(StorageWriter):
    """Writes each rank's boxes to one file in ``folder``.

    Args:
        folder: is there already.
        snapshot: called when this rank knows what it writes and has copied it; None: the tensors are read while they are written.
        finish: called on the coordinator with the table of tensors and the records of files when all is written.
    """

    def __init__(
        self,
        folder: Path,
        snapshot: Callable[[], None] | None,
        finish: Callable[[dict[str, Any], dict[str, FileRecord]], None],
    ):
        self._folder, self._snapshot, self._finish = folder, snapshot, finish

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        file = f"rank-{plan.storage_data:05d}.safetensors"
        entries = [_entry(item, planner, copied=self._snapshot is not None) for item in plan.items]
        if self._snapshot is not None:
            self._snapshot()
        done: Future[list[WriteResult]] = Future()
        if not entries:
            done.set_result([])
            return done
        record = write_tensors(self._folder / file, entries, digest="tensors")
        done.set_result([WriteResult(i.index, _bytes(i), Written(file, _key(i), record)) for i in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = {r.index: r.storage_data for rank in results for r in rank}
        self._finish(_table(metadata, written), {w.file: w.record for w in written.values()})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _entry(item: WriteItem, planner: SavePlanner, *, copied: bool) -> Entry:
    data = item.tensor_data
    assert data is not None
    given: list[torch.Tensor] = []

    def make() -> torch.Tensor:
        tensor = given.pop() if given else planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    if copied:
        given.append(make().to("cpu", copy=True, memory_format=torch.contiguous_format))
    return Entry(_key(item), tuple(data.chunk.sizes), data.properties.dtype, make)


def _key(item: WriteItem) -> str:
    """The name of a whole tensor; of a box, its name and bounds: ``model.up.weight[0:8,16:32]``."""
    data = item.tensor_data
    assert data is not None
    if tuple(data.chunk.sizes) == tuple(data.size):
        return item.index.fqn
    return f"{item.index.fqn}[{','.join(f'{o}:{o + n}' for o, n in zip(data.chunk.offsets, data.chunk.sizes, strict=True))}]"


def _table(metadata: Metadata, written: Mapping[MetadataIndex, Written]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, saved in metadata.state_dict_metadata.items():
        assert isinstance(saved, TensorStorageMetadata)
        boxes = []
        for chunk in saved.chunks:
            where = written[MetadataIndex(name, chunk.offsets)]
            boxes.append(Place(where.file, where.key, tuple(chunk.offsets), tuple(chunk.sizes), where.record.tensors[where.key]))
        found[name] = SavedTensor(saved.properties.dtype, tuple(saved.size), tuple(boxes)).to_json()
    return found


# --- loading ------------------------------------------------------------------------------------------------------


class PieceLoadPlanner(DefaultLoadPlanner):
    """torch's planner over :class:`Piece`: which parts of which saved boxes make up this rank's boxes."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        piece: Piece = self.state_dict[index.fqn]
        assert index.offset is not None
        return piece.view(index.offset)


class PieceReader(StorageReader):
    """Reads slices of the files of a checkpoint that has been checked."""

    def __init__(self, catalogue: Catalogue):
        self._catalogue = catalogue
        self._places: dict[MetadataIndex, Place] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        for name, saved in self._catalogue.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in saved.places]
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype=saved.dtype), torch.Size(saved.shape), chunks)
            self._places.update((MetadataIndex(name, torch.Size(p.offsets)), p) for p in saved.places)
        return Metadata(tensors)

    def place(self, item: ReadItem) -> Place:
        """The saved box that an item reads of."""
        return self._places[item.storage_index]

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._places[item.storage_index].file, []).append(item)
        for file, items in by_file.items():
            with TensorFile(self._catalogue.folder / file) as opened:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    place = self._places[item.storage_index]
                    opened.read_box(place.key, item.storage_offsets, target, place.check)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def read_pieces(pieces: Mapping[str, Piece], catalogue: Catalogue, group: Group | None = None) -> None:
    """Fill every piece from a checkpoint, by ``torch.distributed.checkpoint``'s own plan; reads this rank's slices only.

    The checksum of a box that a rank reads whole is taken while it is read. Those that all ranks read in part are checked before, each by
    one rank.

    Args:
        pieces: this rank's, by full name; the checkpoint has them all.
        catalogue: the checkpoint.
        group: ranks that read together (collective), or None: this one alone.

    Raises:
        FormatError: what is read is damaged.
    """
    planner, reader = PieceLoadPlanner(), PieceReader(catalogue.only(pieces))
    planner.set_up_planner(dict(pieces), reader.read_metadata())
    plan = planner.finish_plan(planner.create_local_plan())
    number = {p: i for i, p in enumerate(p for t in catalogue.tensors.values() for p in t.places)}
    touched = {number[reader.place(item)] for item in plan.items}
    entire = {number[p] for item in plan.items if tuple(item.lengths) == (p := reader.place(item)).sizes}
    everyone = group.gather((touched, entire)) if group is not None else [(touched, entire)]
    left = set().union(*(t for t, _ in everyone)) - set().union(*(e for _, e in everyone))
    places = list(number)
    mine = [places[i] for i in (sorted(left)[group.rank :: group.size] if group is not None else left)]

    def read() -> None:
        reader.read_data(plan, planner)

    for work in (lambda: check_places(catalogue.folder, mine), read):
        if group is None:
            work()
        else:
            group.each(work)
    torch.autograd.graph.increment_version([p.local for p in pieces.values()])  # reading leaves no trace on tensors by itself
