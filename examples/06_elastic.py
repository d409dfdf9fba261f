"""Train on until the end, whatever happens to the ranks: plan for those that are there, go on from the last checkpoint.

meshwright run --elastic -n 3 examples/06_elastic.py [FOLDER]
"""

import sys
import tempfile

import torch
from torch import distributed as dist, nn

import meshwright as mw

STEPS, BATCH = 12, 6
folder = sys.argv[1] if len(sys.argv) > 1 else f"{tempfile.gettempdir()}/meshwright-elastic"

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()


def batch(step: int) -> torch.Tensor:
    """The global batch of a step, the same on every rank and after every restart."""
    return torch.randn(BATCH, 32, generator=torch.Generator().manual_seed(step))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 32))
pm = mw.autoparallelize(model, (ranks,), (batch(0),), strategy="zero3", alternatives=False)
optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2, foreach=True)

start = pm.load_checkpoint(folder, optimizer, optional=True).step or 0
for step in range(start, STEPS):
    loss = (pm(batch(step)) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    pm.save_checkpoint(folder, optimizer, step=step + 1, asynchronous=True, keep_last=2)
    if rank == 0:
        print(f"step {step} on {ranks} ranks: loss {loss.item():.6f}", flush=True)
pm.wait_for_checkpoint()
if rank == 0:
    print(f"trained to step {STEPS} on {ranks} ranks")
dist.destroy_process_group()
