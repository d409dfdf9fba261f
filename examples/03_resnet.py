"""A ResNet with BatchNorm, written in plain PyTorch: the statistics are those of the whole batch, as on one device.

meshwright run -n 2 examples/03_resnet.py
"""

import torch
import torch.nn.functional as F
from torch import distributed as dist, nn

import meshwright as mw


class Block(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.Sequential(Block(16), Block(16))
        self.head = nn.Linear(16, 10)

    def forward(self, images, labels):
        return F.cross_entropy(self.head(self.blocks(self.stem(images)).mean((2, 3))), labels)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = mw.autoparallelize(ResNet(), (dist.get_world_size(),), strategy="ddp")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
images, labels = torch.randn(8, 3, 16, 16), torch.arange(8)  # seeded above: the same on every rank
for step in range(5):
    loss = model(images, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
if dist.get_rank() == 0:
    print(model.plan.report())
dist.destroy_process_group()
