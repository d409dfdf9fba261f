"""The two functions: :func:`plan` for anywhere, :func:`autoparallelize` for the ranks of a mesh."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.debug import Progress
from meshwright.inputs import call_of, model_of
from meshwright.planner.ir import collector
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.hardware import Hardware
from meshwright.planner.ir.mesh import Cluster, MeshShape
from meshwright.planner.ir.plan import Plan
from meshwright.planning import capture_call, model_name, plan_capture
from meshwright.request import Request, one_of
from meshwright.target import target_of

if TYPE_CHECKING:
    from meshwright.runtime.module import ParallelModule
    from meshwright.runtime.pipeline import PipelineModule

BATCHES = ("global", "local")
OUTPUTS = ("auto", "full")


def plan(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    mesh_or_cluster: DeviceMesh | MeshShape | Cluster | str,
    example_inputs: Any,
    *,
    strategy: str = "auto",
    memory_limit: int | str | None = None,
    recompute: str | None = None,
    optimizer: str = "adamw",
    precision: str | None = None,
    hardware: Hardware | str | None = None,
    pins: Mapping[str, Any] | None = None,
    on_missing_rule: str = "replicate",
    degrees: Mapping[str, int] | None = None,
    logical_mesh: str | tuple[int, ...] | Mapping[str, int] | None = None,
    respect_axis_names: bool = False,
    alternatives: bool = True,
    micro_batches: int | None = None,
    schedule: str | None = None,
    stages_per_rank: int | None = None,
    accumulate: int = 1,
    fold_capture: bool = True,
    training: bool | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Plan how a model trains (or infers) across a mesh. Needs neither the devices nor a process group.

    Args:
        model: the module, or a callable that makes it (called on the meta device: no memory whatever the size).
        mesh_or_cluster: torch's ``DeviceMesh``, a :class:`MeshShape`, a :class:`Cluster`, or text as ``"8x8xH100"``.
        example_inputs: a tuple (positional), a dict (keywords), one tensor, or a callable giving either; real, fake or meta
            tensors with the shapes of the *global* batch.
        strategy: ``"auto"``, or ``"ddp"``, ``"zero1"``, ``"zero2"``, ``"zero3"`` (``"fsdp"``), ``"hsdp"``, ``"tp"``, ``"zero1+tp"``: the
            same search with less choice;
            ``"pipeline"`` or ``"model_parallel"`` (one micro-batch): in stages over all devices, unless ``degrees`` says how many.
        memory_limit: bytes per device, or text as ``"60GiB"``. Default: the device's memory less a reserve that the plan names.
        recompute: how much the backward computes again, to keep fewer activations: ``"none"`` (cheap ops alone), ``"selective"``
            (all but products with parameters) or ``"full"`` (whole blocks). Default: the fastest that fits, blocks mixed.
        optimizer: whose state is counted.
        precision: None (as the model is), or ``"bf16-mixed"``: bf16 compute, fp32 parameters and gradient reduction.
        hardware: a :class:`Hardware` record, or the name of a known device.
        pins: what you fix: name pattern of a parameter, an input or an op to placements, ``{"*.mlp.up.weight": "RS(0)"}``.
        on_missing_rule: for an op without a sharding rule: ``"replicate"`` it and say so, or ``"error"``.
        degrees: how many devices for what: ``{"dp": 8, "tp": 8}`` for data, ``cp`` for sequence and ``tp`` for tensor parallelism.
            What is left out is searched: ``{"tp": 8}`` alone leaves the other devices to ``dp`` and ``cp``. ``pp`` is the number of
            pipeline ranks; a mesh axis named ``pp`` says the same.
        logical_mesh: how devices are arranged in axes: ``"search"``, ``"given"`` (the mesh as it is), sizes as ``(8, 8)``, or sizes
            with names as ``{"dp": 8, "tp": 8}``. Default: searched for a cluster and a ``DeviceMesh``; given for a
            :class:`MeshShape`, and where there are pins.
        respect_axis_names: keep the mesh as it is (or as ``logical_mesh`` names its axes), and use axes named ``dp``, ``fsdp``,
            ``cp``, ``tp`` only for what they say.
        alternatives: whether to solve the named strategies too and show them beside the plan.
        micro_batches: into how many pieces the batch is cut, one after the other. Loss and gradients stay those of the whole batch;
            a model for which that is impossible is refused. Default: chosen for stages, else one.
        schedule: order of forward and backward passes of pipeline stages: ``"naive"``, ``"gpipe"``, ``"1f1b"``,
            ``"interleaved_1f1b"``, ``"zero_bubble"`` or ``"zbv"``. Default: ``"1f1b"``, or ``"gpipe"`` with few micro-batches.
        stages_per_rank: pipeline stages per rank. Default: as few as the schedule allows, 2 where it is made for several.
        accumulate: how many passes (``loss.backward()``, or ``pm.step``) you add up before each step of the optimizer. With more than
            one, gradients live through forwards and backwards, which memory counts, each in its parameter's placement. One big batch
            in ``micro_batches`` holds less and reduces gradients once; ``pm.no_sync()`` lets those that are summed whole wait for the
            last pass.
        fold_capture: whether few of the repeated blocks are traced and the others copied, so that depth costs nothing.
        training: whether to plan a backward. Default: whether the model is in training mode and has something to train.
        progress: called with the name of each phase as it begins.

    Raises:
        InputError: an argument that cannot be used.
        TraceError: the model cannot be captured.
        NoRuleError: an op has no rule and ``on_missing_rule="error"``.
        InfeasibleError: nothing satisfies memory limit, strategy and pins together.
    """
    request = _asked(locals())
    target = target_of(mesh_or_cluster, hardware)
    with collector.paused():
        started = time.perf_counter()
        module = model_of(model)
        made_s = time.perf_counter() - started
        captured, times = capture_call(module, call_of(example_inputs), request, training, progress)
        plan_s = {"model_s": made_s, **times}
        return plan_capture(captured, target, request, model_name(module), plan_s, progress, stages_if_faster=True)


def autoparallelize(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    mesh: DeviceMesh | MeshShape | tuple[int, ...],
    example_inputs: Any = None,
    *,
    strategy: str = "auto",
    plan: Plan | None = None,
    precision: str | None = None,
    compile: bool = False,
    hardware: Hardware | str | None = None,
    batch: str = "global",
    outputs: str = "auto",
    memory_limit: int | str | None = None,
    recompute: str | None = None,
    optimizer: str = "adamw",
    pins: Mapping[str, Any] | None = None,
    on_missing_rule: str = "replicate",
    degrees: Mapping[str, int] | None = None,
    logical_mesh: str | tuple[int, ...] | Mapping[str, int] | None = None,
    respect_axis_names: bool = False,
    alternatives: bool = True,
    micro_batches: int | None = None,
    schedule: str | None = None,
    stages_per_rank: int | None = None,
    accumulate: int = 1,
    timeout_s: float | None = None,
    fold_capture: bool = True,
    init: str = "replay",
) -> ParallelModule | PipelineModule:
    """Make the module that trains across ``mesh``. Call it on every rank, with the same arguments.

    The result has the original parameter names and works with any ``torch.optim`` optimizer, ``loss.backward()``,
    ``clip_grad_norm_`` and ``state_dict``. The first rank plans and gives the plan to the others. A plan with pipeline stages gives a
    module that is trained with ``loss = pm.step(batch)``, which works for every plan.

    Args:
        model: the module; every rank passes the same weights. Or a callable that makes it, for models that no rank should hold whole:
            it is called on the meta device and ``init`` says where values come from.
        mesh: torch's ``DeviceMesh``, whose ranks the plan may arrange in other axes (``pm.device_mesh``); a tuple of sizes or a
            :class:`MeshShape` makes one over the first ranks of the world.
        example_inputs: as for :func:`plan`. None: plan at the first call, with that call's batch.
        plan: a plan made before for this model and mesh; nothing is searched then.
        compile: whether forward and backward go through Inductor.
        timeout_s: how long a rank waits for its neighbours in a step over pipeline stages before all end with a :class:`StepError`;
            it must cover the longest compilation and stall. Default: the process group's own timeout.
        batch: ``"global"``: every rank passes the whole batch; ``"local"``: its own piece, as ``plan.inputs`` says.
        init: first values where ``model`` is a callable. ``"replay"``: those of ``model()`` in one process with the first rank's random
            state, bit for bit; ``"sharded"``: drawn piece by piece, faster and other numbers, which the plan says; ``"none"``: a
            checkpoint is loaded next.
        outputs: ``"auto"``: a loss comes as a plain tensor and what is beside it as DTensors; ``"full"``: all plain and whole.
        strategy, precision, hardware, memory_limit, recompute, optimizer, pins, on_missing_rule, degrees, logical_mesh,
            respect_axis_names, alternatives, micro_batches, schedule, stages_per_rank, accumulate, fold_capture: as for :func:`plan`.

    Raises:
        InputError: an argument that cannot be used; the process group is not initialised; the mesh is larger than the
            world; the plan is for another model.
        RuntimeMismatchError: the plan is for another number of devices.
        MeshwrightError: what :func:`plan` raises.
    """
    from meshwright.first import FirstValues
    from meshwright.lazy import LazyParallelModule, Maker

    one_of("batch", batch, BATCHES)
    one_of("outputs", outputs, OUTPUTS)
    first = FirstValues.of(model, init)
    if first is not None and example_inputs is None:
        raise InputError(
            "a callable that makes the model needs example_inputs: its values are drawn into the pieces that a plan says"
        )
    model = model_of(model)
    device_mesh = running_mesh(mesh)
    precision = precision if plan is None else plan.precision
    request = _asked(locals())
    target = replace(target_of(device_mesh, hardware), searched=isinstance(mesh, DeviceMesh))
    maker = Maker(device_mesh, target, request, plan, batch, outputs, compile, timeout_s)
    if example_inputs is not None:
        made = maker.make(model, call_of(example_inputs), notes=first.notes if first is not None else ())
        if first is not None:
            first.give(made)
        return made
    if (plan is not None and plan.pipeline is not None) or (plan is None and request.in_stages(target) is not None):
        raise InputError("pipeline stages need example_inputs: which rank holds which parameter is known only with a plan")
    if batch == "local":
        raise InputError(
            'batch="local" needs example_inputs with the global shapes: a local batch alone does not say how it was cut'
        )
    return LazyParallelModule(model, maker)


def _asked(keywords: Mapping[str, Any]) -> Request:
    """What a call asks of a plan: those of its keywords that are fields of a request, by name."""
    return Request(**{f.name: keywords[f.name] for f in fields(Request)})


def running_mesh(mesh: DeviceMesh | MeshShape | tuple[int, ...]) -> DeviceMesh:
    """The device mesh of the running process group.

    Raises:
        InputError: no process group, more devices than ranks, or this rank is not in the mesh.
    """
    if isinstance(mesh, tuple) and all(isinstance(n, int) for n in mesh):
        mesh = MeshShape.of(*mesh)
    if isinstance(mesh, str | Cluster):
        raise InputError(f"mesh {mesh} is a cluster to plan for; to run, pass a torch DeviceMesh, or sizes as (2, 2)")
    if not dist.is_available() or not dist.is_initialized():
        raise InputError(
            "no process group: start the script with torchrun or `meshwright run -n 4 script.py`, "
            "and call torch.distributed.init_process_group() first"
        )
    if isinstance(mesh, MeshShape):
        if mesh.num_devices > dist.get_world_size():
            raise InputError(f"mesh {mesh} needs {mesh.num_devices} ranks, and the world has {dist.get_world_size()}")
        device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
        mesh = init_device_mesh(device_type, mesh.sizes, mesh_dim_names=mesh.names)
    if not isinstance(mesh, DeviceMesh):
        raise InputError(f"mesh is {type(mesh).__name__}; it must be a torch DeviceMesh, a MeshShape or a tuple of sizes")
    if mesh.get_coordinate() is None:
        raise InputError(f"rank {dist.get_rank()} is not in the mesh of ranks {mesh.mesh.flatten().tolist()}")
    return mesh
