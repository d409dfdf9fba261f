"""Where the results of the graph must end."""

from __future__ import annotations

from meshwright.planner.ir.graph import GraphOutput, OpGraph


def has_loss(graph: OpGraph) -> bool:
    """Whether a user output is a loss: a floating tensor without dims."""
    return any(o.value is not None and not o.value.shape and o.value.dtype.is_floating_point for o in graph.outputs_of("output"))


def ends_free(output: GraphOutput, loss: bool) -> bool:
    """Whether a result may end in whatever placement it is made (never partial): user outputs beside a loss."""
    return output.role == "output" and loss and output.value is not None and len(output.value.shape) > 0


def phase_of_result(output: GraphOutput) -> str:
    """The phase at whose end a result is redistributed."""
    return "backward" if output.role == "gradient" else "forward"


def parameter_of(graph: OpGraph) -> dict[str, str]:
    """FQN (aliases too) to the value name of the parameter's placeholder."""
    return {name: p.value.name for p in graph.inputs_of("parameter") for name in (p.name, *p.aliases)}
