"""A DiT block on attention(): no mask, and a conditioning that scales, shifts and gates (adaLN).

https://arxiv.org/abs/2212.09748, figure 3. Beside it, the same block on torch's SDPA.
"""

from collections.abc import Callable

import torch
from attention_worklog import attention
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

if torch.cuda.is_available():  # the sizes of DiT-XL/2, on images of 512 x 512
    device, dtype, width, heads, batch, patches = "cuda", torch.bfloat16, 1152, 16, 16, 1024
else:
    device, dtype, width, heads, batch, patches = "cpu", torch.float32, 128, 2, 2, 36


class DiTBlock(nn.Module):
    """Patches [batch, patches, width] and a conditioning [batch, width] -> patches."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, conditioning: Tensor) -> Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(conditioning)[
            :, None
        ].chunk(6, dim=-1)  # each [batch, 1, width]
        h = self.norm(x) * (1 + scale) + shift
        # each [batch, heads, patches, head_dim], as a view
        q, k, v = self.qkv(h).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate * self.projection(self.attend(q, k, v).transpose(1, 2).flatten(2))
        h = self.norm(x) * (1 + mlp_scale) + mlp_shift
        return x + mlp_gate * self.mlp(h)


torch.manual_seed(0)
block = DiTBlock(attention).to(device, dtype)
x = torch.randn(batch, patches, width, device=device, dtype=dtype, requires_grad=True)
conditioning = torch.randn(batch, width, device=device, dtype=dtype)
weights = torch.randn_like(x)


def output_and_gradient() -> tuple[Tensor, Tensor]:
    output = block(x, conditioning)
    return output, torch.autograd.grad((output * weights).sum(), x)[0]


ours = output_and_gradient()
block.attend = scaled_dot_product_attention
for name, found, expected in zip(("output", "gradient"), ours, output_and_gradient(), strict=True):
    difference = (found - expected).float().norm() / expected.float().norm()
    print(f"{name} {list(found.shape)}: differs from SDPA's by {difference:.1e} of its norm")
print(f"{dtype} rounds by {torch.finfo(dtype).eps:.1e}")
