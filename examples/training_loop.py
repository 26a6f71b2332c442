"""Trains a small GPT on attention(), in plain torch: it learns the bytes of this file by heart."""

from pathlib import Path

import torch
from attention_worklog import attention
from torch import Tensor, nn
from torch.nn import functional

if torch.cuda.is_available():
    device, width, heads, layers, batch, context, steps = "cuda", 512, 8, 6, 16, 1024, 300
else:
    device, width, heads, layers, batch, context, steps = "cpu", 64, 1, 1, 4, 32, 36


class Block(nn.Module):
    """[batch, context, width] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        # each [batch, heads, context, head_dim], as a view
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        o = attention(q, k, v, causal=True)
        x = x + self.projection(o.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Bytes [batch, context] -> logits of the next ones [batch, context, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.blocks(self.bytes(text) + self.positions[: text.shape[1]]))


torch.manual_seed(0)
text = torch.tensor(list(Path(__file__).read_bytes()), device=device)
model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if device == "cuda" else 1e-2)

for step in range(steps):
    starts = torch.randint(len(text) - context, (batch, 1), device=device)
    window = text[starts + torch.arange(context + 1, device=device)]
    with torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda"):
        logits = model(window[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % (steps // 6) == 0 or step == steps - 1:
        print(f"step {step:3}: {loss.item():.3f} nats a byte")
