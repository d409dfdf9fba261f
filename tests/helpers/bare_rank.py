"""One rank that loads an export and trains on, in a process where neither the planner nor any model's source can be imported.

    python bare_rank.py RANK RANKS FOLDER '{"compile": false}'

Writes ``wrong-RANK.json``: names of what is not bit-equal to the numbers in the folder.
"""

from __future__ import annotations

import importlib.abc
import json
import sys
from pathlib import Path
from typing import Any

PLANNER = [
    f"meshwright.planner.{name}"
    for name in (
        *("trace", "rules", "cost", "fuse", "blocks", "solve", "search", "remat", "race", "on_mesh", "repeat", "pipelined"),
        *("simulate", "assemble", "meshes", "levels", "parts", "micro", "weights", "join", "normalise", "decompose"),
    )
]
BLOCKED = (
    "ortools",
    "transformers",
    "rich",
    "typer",
    "tests",
    "meshwright.api",
    "meshwright.planning",
    "meshwright.report",
    *PLANNER,
)
"""What an environment that runs exports need not have: the solver, models' sources, the planner itself."""


class Block(importlib.abc.MetaPathFinder):
    """Refuses to import what is in :data:`BLOCKED`."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in BLOCKED):
            raise ImportError(f"{fullname} is blocked")


def numbers(pm: Any, losses: list[Any]) -> dict[str, Any]:
    """This rank's losses, parameters and buffers."""
    return {"losses": losses, "tensors": {n: getattr(t, "_local_tensor", t).clone() for n, t in pm.state_dict().items()}}


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Names of what is not bit-equal."""
    import torch

    mine, theirs = found["tensors"], wanted["tensors"]
    wrong = [] if list(mine) == list(theirs) else [f"names {list(mine)}, wanted {list(theirs)}"]
    wrong += [name for name, t in theirs.items() if name in mine and not torch.equal(t, mine[name])]
    pairs = zip(found["losses"], wanted["losses"], strict=True)
    return wrong + [f"loss {i}: {a}, wanted {b}" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]


def take_steps(pm: Any, optimizer: Any, batches: list[Any]) -> list[Any]:
    """Train on some batches; the losses."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        losses.append(pm.step(batch))
        optimizer.step()
    return losses


def adamw(pm: Any) -> Any:
    import torch

    return torch.optim.AdamW(pm.parameters(), lr=1e-3)


def load_and_compare(rank: int, folder: Path, options: dict[str, Any]) -> list[str]:
    """Load the export in ``folder``, train on its batches, compare with its numbers."""
    import torch

    import meshwright as mw

    pm: Any = mw.load(folder / "export", **options)
    optimizer = adamw(pm)
    pm.load_checkpoint(folder / "export" / "state", optimizer)
    losses = take_steps(pm, optimizer, torch.load(folder / "batches.pt"))
    wrong = differences(numbers(pm, losses), torch.load(folder / f"numbers-{rank}.pt"))
    for name, whole in torch.load(folder / "outputs.pt").items() if (folder / "outputs.pt").exists() else ():
        pm.eval()
        with torch.no_grad():
            found = pm(**torch.load(folder / "inference.pt"))
        value = found[name]
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        wrong += [] if torch.equal(value, whole) else [f"inference output {name}"]
    return wrong


def main() -> None:
    rank, ranks, folder, options = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
    sys.meta_path.insert(0, Block())
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    wrong = load_and_compare(rank, folder, options)
    (folder / f"wrong-{rank}.json").write_text(json.dumps(wrong))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
