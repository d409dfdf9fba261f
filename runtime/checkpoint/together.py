"""Work that all ranks do or none: what one raises, all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh

from meshwright.planner.ir import errors
from meshwright.planner.ir.errors import CheckpointError, MeshwrightError

T = TypeVar("T")


class Group:
    """The ranks of a mesh, with a process group of their own: a checkpoint that is written in the background must not share one with
    training.

    Collective over the ranks of the mesh.
    """

    def __init__(self, mesh: DeviceMesh):
        ranks = mesh.mesh.flatten().tolist()
        backend = "gloo" if dist.get_backend() == "nccl" else None
        everyone = len(ranks) == dist.get_world_size()
        self.group = dist.new_group(sorted(ranks), backend=backend, use_local_synchronization=not everyone)
        self.rank, self.size = dist.get_rank(self.group), len(ranks)

    def gather(self, item: Any) -> list[Any]:
        """Every rank's item, on every rank."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, item, group=self.group)
        return found

    def to_first(self, item: T) -> list[T]:
        """Every rank's item on the first rank; the others get nothing."""
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(item, found, group=self.group, group_dst=0)
        return found or []

    def from_first(self, make: Callable[[], T]) -> T:
        """What ``make`` gives on the first rank, on all ranks.

        Raises:
            MeshwrightError: what it raised there, on all ranks.
        """
        return self.each(lambda: make() if self.rank == 0 else None)[0]

    def each_own(self, make: Callable[[], T]) -> T:
        """What ``make`` gives on this rank, unless it raises on any: then as :meth:`each`."""
        kept: list[T] = []
        self.each(lambda: kept.append(make()))
        return kept[0]

    def each(self, make: Callable[[], Any]) -> list[Any]:
        """What ``make`` gives on each rank, on all ranks.

        Raises:
            MeshwrightError: where it raised on any rank; this rank's own error, or else the first one's.
        """
        result, error = None, None
        try:
            result = make()
        except Exception as e:
            error = e
        found = self.gather((result, None if error is None else (type(error).__name__, str(error))))
        if error is not None:
            raise error
        for rank, (_, failure) in enumerate(found):
            if failure is not None:
                kind, text = failure
                raise error_of(kind, text, rank)
        return [value for value, _ in found]


def error_of(kind: str, text: str, rank: int) -> MeshwrightError:
    """Another rank's error."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, MeshwrightError) and known is not errors.InfeasibleError:
        return known(text)
    return CheckpointError(f"rank {rank} failed: {kind}: {' '.join(text.split())}")


def error_of_torch(failed: CheckpointException) -> MeshwrightError:
    """The first rank's error out of torch's record of all."""
    rank = min(failed.failures)
    error = failed.failures[rank][0]
    return error if isinstance(error, MeshwrightError) else error_of(type(error).__name__, str(error), rank)
