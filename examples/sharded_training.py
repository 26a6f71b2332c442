"""Trains a small GPT on sequences that are sharded over ranks: it learns the bytes of this file.

    torchrun --nproc-per-node 2 examples/sharded_training.py

Each rank has its part of every sequence, and the whole model. Attention alone crosses the parts.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from attention_worklog import attention, sharded
from torch import Tensor, nn
from torch.nn import functional

if "LOCAL_RANK" not in os.environ:
    sys.exit(f"it needs ranks: torchrun --nproc-per-node 2 {sys.argv[0]}")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    width, heads, layers, batch, context, steps = 512, 8, 6, 1, 16384, 120
else:
    device = torch.device("cpu")
    width, heads, layers, batch, context, steps = 64, 1, 1, 4, 32, 48
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


class Block(nn.Module):
    """[batch, tokens, width] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = sharded.attention
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        # each [batch, heads, tokens, head_dim], as a view
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        o = self.attend(q, k, v, causal=True)
        x = x + self.projection(o.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Bytes [batch, tokens] and their positions [tokens] -> logits [batch, tokens, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.head(self.blocks(self.bytes(tokens) + self.positions[positions]))


def loss_of(tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    """What these tokens add to the mean over all tokens of the batch."""
    with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(tokens, positions)
    losses = functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction="sum"
    )
    return losses / (batch * context)


torch.manual_seed(0)  # the same model and the same windows on all ranks
text = torch.tensor(list(Path(__file__).read_bytes()) * 8, device=device)
model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if device.type == "cuda" else 1e-2)

for step in range(steps):
    starts = torch.randint(len(text) - context, (batch, 1)).to(device)
    window = text[starts + torch.arange(context + 1, device=device)]
    # The labels are shifted first: a rank's last token is not followed by the next part's first.
    whole = window[:, :-1], window[:, 1:], torch.arange(context, device=device)
    part = [sharded.shard(t, dim=-1) for t in whole]
    optimizer.zero_grad()
    loss = loss_of(*part)
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    dist.all_reduce(loss.detach_())
    if dist.get_rank() == 0 and (step % (steps // 6) == 0 or step == steps - 1):
        print(f"step {step:3}: {loss.item():.3f} nats a byte")

with torch.no_grad():
    loss = loss_of(*part)
    dist.all_reduce(loss)
    for block in model.blocks:
        block.attend = attention
    alone = loss_of(*whole)
if dist.get_rank() == 0:
    print(
        f"the last window's loss differs from one rank's by {abs(loss - alone) / alone:.1e} of it"
    )
dist.destroy_process_group()
