"""Train a GPT-2 across local ranks with the loop you already have.

meshwright run -n 4 examples/01_train_by_hand.py
"""

from pydoc_data.topics import topics

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

import meshwright as mw

BATCH, SEQ = 8, 64

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
rank = dist.get_rank()

torch.manual_seed(0)  # every rank starts from the same weights
config = GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=SEQ, vocab_size=256, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
model = mw.autoparallelize(GPT2LMHeadModel(config), mesh)  # plans at the first call, for that call's batch
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

text = torch.tensor(list("\n".join(topics.values()).encode()))
for step in range(10):
    start = torch.randint(len(text) - SEQ, (BATCH,), generator=torch.Generator().manual_seed(step))
    ids = torch.stack([text[s : s + SEQ] for s in start])  # the global batch, the same on every rank
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)

if rank == 0:
    print(model.plan.report())
dist.destroy_process_group()
