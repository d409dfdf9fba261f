"""The main job on real input: ``python -m meshwright.demo``.

A 6-layer GPT-2 of Hugging Face learns English, byte by byte, from the text of Python's own help topics: 30 AdamW steps, once in
one process, once on four local ranks that Meshwright plans and runs as a 2x2 mesh. Prints the plan, both loss curves and
their largest difference; exit code 1 if that exceeds ``TOLERANCE``.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

RANKS = (2, 2)
STEPS = 30
BATCH, SEQ = 16, 128
LEARNING_RATE = 5e-4
TOLERANCE = 1e-5
"""Largest relative difference of two losses that counts as equal: float32 sums in another order, amplified by 30 AdamW steps."""


def batches() -> Iterator[torch.Tensor]:
    """Byte-level tokens of the help topics, [BATCH, SEQ] at a time, the same on every call."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(tokens) - SEQ, (BATCH,), generator=draw)
        yield torch.stack([tokens[s : s + SEQ] for s in starts])


def make_model() -> nn.Module:
    """A GPT-2 of 6 layers over bytes, 1.2 million parameters, the same weights on every call."""
    from transformers import GPT2Config, GPT2LMHeadModel, logging

    logging.set_verbosity_error()  # it warns of token ids that bytes do not have
    torch.manual_seed(0)
    config = GPT2Config(n_layer=6, n_embd=128, n_head=4, n_positions=SEQ, vocab_size=256, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0  # one process and four would draw other numbers
    return GPT2LMHeadModel(config).train()


def train(model: nn.Module, step_done: Callable[[], object]) -> list[float]:
    """The training loop, the same for one process and for many ranks: the loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for _, ids in zip(range(STEPS), batches(), strict=False):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        step_done()
    return losses


def main() -> int:
    """Train in one process, then on the ranks; compare."""
    from meshwright.runtime.launch import run_script

    console = Console(highlight=False)
    started = time.perf_counter()
    torch.set_num_threads(1)
    console.print(f"One process: GPT-2, 6 layers, {STEPS} steps of {BATCH} x {SEQ} bytes of Python's help topics")
    one = _with_bar("one process", console, lambda tick: train(make_model(), tick))
    ranks = RANKS[0] * RANKS[1]
    console.print(f"\n{ranks} ranks: the same on a {RANKS[0]}x{RANKS[1]} mesh of local CPU ranks over gloo")
    with tempfile.TemporaryDirectory() as folder:
        result, script = Path(folder) / "losses.json", Path(folder) / "ranks.py"
        script.write_text("import sys\nfrom meshwright.demo import rank_main\nrank_main(sys.argv[1])\n")
        code = run_script(str(script), [str(result)], ranks)
        if code != 0 or not result.exists():
            console.print(f"the ranks ended with exit code {code}")
            return code or 1
        many = json.loads(result.read_text())
    difference = max(abs(a - b) / abs(a) for a, b in zip(one, many, strict=True))
    console.print(_curves(one, many))
    equal = difference <= TOLERANCE
    console.print(f"largest relative difference {difference:.1e}, allowed {TOLERANCE:.0e}: {'equal' if equal else 'DIFFERENT'}")
    console.print(f"{time.perf_counter() - started:.0f} s in all")
    return 0 if equal else 1


def rank_main(result: str) -> None:
    """What every rank runs: plan, train, and the first rank reports."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import meshwright as mw

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", RANKS)
    ids = next(batches())
    model = mw.autoparallelize(make_model(), mesh, {"input_ids": ids, "labels": ids})
    console = Console(highlight=False, quiet=dist.get_rank() != 0)
    if dist.get_rank() == 0:
        print(model.plan.report(), flush=True)
    losses = _with_bar(f"{mesh.size()} ranks", console, lambda tick: train(model, tick))
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(losses))
    dist.destroy_process_group()


def _with_bar(title: str, console: Console, work: Callable[[Callable[[], object]], list[float]]) -> list[float]:
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=STEPS)
        return work(lambda: progress.advance(task))


def _curves(one: list[float], many: list[float], height: int = 10) -> str:
    """Both curves as text: ``o`` one process, ``x`` the ranks, ``*`` where they fall on one point."""
    low, high = min(one + many), max(one + many)

    def row(loss: float) -> int:
        return round((high - loss) / (high - low) * (height - 1)) if high > low else 0

    grid = [[" "] * len(one) for _ in range(height)]
    for step, (a, b) in enumerate(zip(one, many, strict=True)):
        grid[row(a)][step] = "o"
        grid[row(b)][step] = "*" if row(a) == row(b) else "x"
    lines = [f"{high - (high - low) * i / (height - 1):6.3f} | {' '.join(cells)}" for i, cells in enumerate(grid)]
    return "\n".join(["", "loss     (o one process, x ranks, * both)", *lines, *_rows(one, many), ""])


def _rows(one: list[float], many: list[float]) -> Iterable[str]:
    yield f"\n{'step':>6}{'one process':>14}{'ranks':>14}{'difference':>14}"
    for step in sorted({*range(0, len(one), 5), len(one) - 1}):
        yield f"{step + 1:>6}{one[step]:>14.6f}{many[step]:>14.6f}{many[step] - one[step]:>14.1e}"


if __name__ == "__main__":
    sys.exit(main())
