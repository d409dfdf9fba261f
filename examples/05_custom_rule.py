"""A rule for an op that Meshwright does not know: one line, proved, then planned with.

python examples/05_custom_rule.py
"""

import torch
from torch import nn

import meshwright as mw
from meshwright.prove import op_of_call, prove_op


@torch.library.custom_op("examples::softcap", mutates_args=())
def softcap(scores: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(scores / cap)


@softcap.register_fake
def _(scores, cap):
    return torch.empty_like(scores)


softcap.register_autograd(
    lambda ctx, grad: (grad * (1 - (ctx.saved_tensors[0] / ctx.cap).square()), None),
    setup_context=lambda ctx, inputs, output: (ctx.save_for_backward(output), setattr(ctx, "cap", inputs[1])),
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return self.down(softcap(self.up(x), 30.0)).square().mean()


batch = (torch.empty(512, 256, device="meta"),)
before = mw.plan(Model, "4xH100", batch, strategy="tp")
print("without a rule:", *(f"{f.target} runs replicated, {f.time_s * 1e6:.0f} µs" for f in before.fallbacks))

mw.rule("examples.softcap.default", "...->...")  # any dim may be sharded; not linear, so it needs complete sums

op, inputs = op_of_call(torch.ops.examples.softcap.default, torch.randn(12, 6), 30.0)
rows = prove_op(op, inputs)  # runs every row on real pieces and compares with the whole op
print("proved", ", ".join(map(str, rows)), "equal to one device")

after = mw.plan(Model, "4xH100", batch, strategy="tp")
assert not after.fallbacks
print(after.report())
