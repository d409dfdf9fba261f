"""Our stages inside ``torch.distributed.pipelining``: its schedules order the actions and move the tensors.

The engine's own stage runs a module under autograd. Ours runs generated forward and backward code, keeps what the backward
needs itself, and frees every buffer as soon as it is used: the engine would keep receive buffers of all micro-batches for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from meshwright.passes.stage_graphs import Slot
from meshwright.runtime.journal import Journal
from meshwright.runtime.stage import StageRun

_SINGLE: dict[str, Any] = {"naive": ScheduleGPipe, "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SEVERAL: dict[str, Any] = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class Logged(NamedTuple):
    """One action that ran.

    Attributes:
        kind, stage, micro_batch: as in ``planner.orders.Action``.
        cpu_s: CPU seconds of the thread that ran it.
        held_bytes: what the stage holds for later backwards when it ends; 0 where it was not asked for.
    """

    kind: str
    stage: int
    micro_batch: int
    cpu_s: float
    held_bytes: int


_PAD = Slot("", (1,), torch.float32)
"""Stands where a boundary has fewer forward values than gradients: the engine pairs them by position."""


class EngineStage(PipelineStage):
    """One stage as the engine sees it.

    Args:
        run: what it runs.
        count: number of stages.
        rank_of: coordinate along the pipeline axis of the rank that runs a stage.
        device: of its tensors.
        group: the ranks along the pipeline axis.
        journal: where actions are noted.
    """

    def __init__(
        self,
        run: StageRun,
        count: int,
        rank_of: Callable[[int], int],
        device: torch.device,
        group: dist.ProcessGroup,
        journal: Journal,
    ):
        program = run.program
        self.run, self.journal, self._rank_of = run, journal, rank_of
        self.log: list[Logged] | None = None
        self.weighs = False
        self._in, self._out = len(program.receives), len(program.sends)
        ins = _padded(program.receives, len(program.upstream))
        outs = _padded(program.sends, len(program.downstream))
        super().__init__(
            nn.Identity(),
            program.index,
            count,
            device,
            input_args=tuple(map(_meta, ins)),
            output_args=tuple(map(_meta, outs)) if program.index < count - 1 else (torch.empty((), device="meta"),),
            input_grads=_gradients(program.upstream, len(ins)),
            output_grads=_gradients(program.downstream, len(outs)),
            group=group,
        )

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._prepare_forward_infra(*args, **kwargs)
        self._drop(self.args_recv_info)
        return found

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._prepare_backward_infra(*args, **kwargs)
        self._drop(self.grad_recv_info)
        return found

    def _drop(self, infos: dict[int, tuple[Any, ...]]) -> None:
        for chunk in infos.values():
            for info in chunk:
                info.buffer = None

    def _allocate(self, infos: Sequence[Any]) -> None:
        for info in infos:
            if info.tensor_meta is not None and not info.is_root_arg:
                info.buffer = torch.empty(info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=self.device)

    def _take(self, infos: Sequence[Any]) -> list[torch.Tensor]:
        taken = [info.buffer for info in infos]
        for info in infos:
            info.buffer = None
        return taken

    # --- what the schedules call ----------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_first:
            self._allocate(self.args_recv_info[fwd_chunk_id])
            self._wait("activations", fwd_chunk_id, self.stage_index - 1)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            self._allocate(self.grad_recv_info[bwd_chunk_id])
            self._wait("gradients", bwd_chunk_id, self.stage_index + 1)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _now(self) -> float:
        """CPU seconds of this thread, where actions are logged: the clock takes as long as a kernel."""
        return 0.0 if self.log is None else time.thread_time()

    def _ran(self, kind: str, chunk: int, began_s: float) -> None:
        if self.log is not None:
            seconds = time.thread_time() - began_s
            self.log.append(Logged(kind, self.stage_index, chunk, seconds, self.run.held_bytes() if self.weighs else 0))

    def _wait(self, what: str, chunk: int, stage: int) -> None:
        self.journal.doing(
            f"waiting for {what} of micro-batch {chunk} from stage {stage} on pipeline rank {self._rank_of(stage)}"
        )

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        self.fwd_cache[fwd_chunk_id] = ((), [])
        return ops

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        if not self.has_backward:
            return
        for info, grad in zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True):
            info.buffer = grad

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        self.journal.doing(f"computing F{fwd_chunk_id} of stage {self.stage_index}")
        received = self._take(self.args_recv_info[fwd_chunk_id])[: self._in] if not self.is_first else []
        began_s = self._now()
        sent = self.run.forward(fwd_chunk_id, received, keep=self.has_backward)
        self._ran("F", fwd_chunk_id, began_s)
        self.journal.doing(f"communicating after F{fwd_chunk_id} of stage {self.stage_index}")
        if self.is_last:
            self.fwd_cache[fwd_chunk_id] = ((), [])
            return torch.zeros((), device=self.device)
        assert self._stage_meta.outputs is not None
        pad = [torch.zeros(1, device=self.device)] * (len(self._stage_meta.outputs) - self._out)
        outputs = (*sent, *pad)
        self.fwd_cache[fwd_chunk_id] = (outputs, [])
        return outputs

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        letter = "B" if full_backward else "I"
        self.journal.doing(f"computing {letter}{bwd_chunk_id} of stage {self.stage_index}")
        self.fwd_cache.pop(bwd_chunk_id, None)
        given = [] if self.is_last else self._take(self.grad_recv_info[bwd_chunk_id])
        began_s = self._now()
        made = self.run.backward(bwd_chunk_id, given[: len(self.run.program.downstream)], whole=full_backward)
        self._ran(letter, bwd_chunk_id, began_s)
        if not self.is_first:
            self.bwd_cache[bwd_chunk_id] = (*made, *([None] * (len(self.args_recv_info[bwd_chunk_id]) - len(made))))
        self.journal.doing(f"communicating after {letter}{bwd_chunk_id} of stage {self.stage_index}")

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if self.has_backward:
            self.journal.doing(f"computing W{bwd_chunk_id} of stage {self.stage_index}")
            began_s = self._now()
            self.run.weights(bwd_chunk_id)
            self._ran("W", bwd_chunk_id, began_s)


def _padded(slots: Sequence[Slot], least: int) -> list[Slot]:
    return [*slots, *([_PAD] * (least - len(slots)))]


def _meta(slot: Slot) -> torch.Tensor:
    return torch.empty(slot.shape, dtype=slot.dtype, device="meta")


def _gradients(slots: Sequence[Slot], length: int) -> tuple[torch.Tensor | None, ...]:
    return (*map(_meta, slots), *([None] * (length - len(slots))))


class Engine:
    """A schedule over this rank's stages.

    Args:
        name: of the schedule.
        stages: this rank's, in order.
        micro_batches: how many.
    """

    def __init__(self, name: str, stages: Sequence[EngineStage], micro_batches: int):
        self._stages, self._count = stages, micro_batches
        kind = _SINGLE.get(name)
        options = {"n_microbatches": micro_batches, "loss_fn": lambda made, _: made, "scale_grads": False}
        self._schedule = kind(stages[0], **options) if kind is not None else _SEVERAL[name](list(stages), **options)

    def log_actions(self, *, held: bool = True) -> list[Logged]:
        """Start to log what runs; the list that grows.

        Args:
            held: whether to sum up what stages hold, which takes as long as a small action.
        """
        log: list[Logged] = []
        for stage in self._stages:
            stage.log, stage.weighs = log, held
        return log

    def run(self, *, training: bool) -> None:
        """All actions of one step."""
        target = torch.zeros(self._count) if any(s.is_last for s in self._stages) else None
        with torch.enable_grad():  # the engine insists; our stages never record
            if training:
                self._schedule.step(target=target, losses=[], return_outputs=False)
            else:
                self._schedule.eval(target=target, losses=[], return_outputs=False)
