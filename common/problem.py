"""Problems: shape, dtype and mask of one call; the ones that are measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    head_dim: int

    @property
    def q(self) -> tuple[int, ...]:
        return (self.batch, self.heads, self.seq_q, self.head_dim)

    @property
    def kv(self) -> tuple[int, ...]:
        return (self.batch, self.kv_heads, self.seq_k, self.head_dim)

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return f"{self.batch}x{heads}x{self.seq_q}x{self.seq_k}x{self.head_dim}"


@dataclass(frozen=True)
class Specialization:
    """What a step is compiled for. dtype is "bf16", "fp16" or "fp32"."""

    head_dim: int
    dtype: str
    causal: bool

    @property
    def defines(self) -> tuple[str, ...]:
        """For a compiler, nvcc or the host's."""
        return (
            f"-DHEAD_DIM={self.head_dim}",
            f"-DELEMENT={self.dtype}",
            f"-DCAUSAL={int(self.causal)}",
        )

    def __str__(self) -> str:
        return f"d{self.head_dim}_{self.dtype}{'_causal' if self.causal else ''}"


@dataclass(frozen=True)
class Problem:
    """dtype is "bf16", "fp16" or "fp32"; causal: the last query sees the last key."""

    shape: Shape
    dtype: str
    causal: bool = False

    @property
    def specialization(self) -> Specialization:
        return Specialization(self.shape.head_dim, self.dtype, self.causal)

    def as_record(self) -> dict:
        """A record's shape."""
        return {**asdict(self.shape), "dtype": self.dtype, "causal": self.causal}


HEADLINE = Problem(Shape(4, 16, 16, 4096, 4096, 128), "bf16")
# What a step's shared memory accesses are counted on: small, as the SIMT runtime executes it.
COUNTED = Problem(Shape(1, 1, 1, 128, 256, 128), "bf16")

# FlashAttention's convention: the same number of tokens and the same hidden size in every cell.
TOKENS, HIDDEN = 16384, 2048


def _over_lengths() -> Iterator[tuple[str, Problem]]:
    for head_dim, causal, seq in product((64, 128, 256), (False, True), (1024, 4096, 16384)):
        heads = HIDDEN // head_dim
        shape = Shape(TOKENS // seq, heads, heads, seq, seq, head_dim)
        yield f"d{head_dim}{'_causal' if causal else ''}_{seq}", Problem(shape, "bf16", causal)
    # Llama 3 of 70 billion parameters: eight heads share a head of K and V.
    for causal, seq in product((False, True), (4096, 16384)):
        shape = Shape(1, 64, 8, seq, seq, 128)
        yield f"gqa{'_causal' if causal else ''}_{seq}", Problem(shape, "bf16", causal)


def _of_models() -> Iterator[tuple[str, Problem]]:
    """Head dimensions and lengths that no tile was made for."""
    for head_dim, causal in product((72, 80, 96, 192), (False, True)):
        # SigLIP has 16 heads of 72.
        batch, heads = (8, 16) if head_dim == 72 else (4, HIDDEN // head_dim)
        shape = Shape(batch, heads, heads, 4096, 4096, head_dim)
        yield f"d{head_dim}{'_causal' if causal else ''}_4096", Problem(shape, "bf16", causal)
    yield "vit_197", Problem(Shape(16, 12, 12, 197, 197, 64), "bf16")
    yield "vit_577", Problem(Shape(16, 12, 12, 577, 577, 64), "bf16")
    yield "whisper_1500", Problem(Shape(8, 20, 20, 1500, 1500, 64), "bf16")
    yield "cross_attention_77", Problem(Shape(8, 10, 10, 4096, 77, 64), "bf16")
    yield "flux_4608", Problem(Shape(1, 24, 24, 4608, 4608, 128), "bf16")
    # One sequence through a large encoder: hardly more work than one round of the SMs.
    yield "encoder_2048", Problem(Shape(1, 16, 16, 2048, 2048, 64), "bf16")
    # Llama 3 again: a part of a prompt after the keys of the parts before it.
    yield "prefill_causal_32768", Problem(Shape(1, 64, 8, 1024, 32768, 128), "bf16", causal=True)


# By a cell's name.
GRID_OVER_LENGTHS = dict(_over_lengths())
GRID = GRID_OVER_LENGTHS | dict(_of_models())
# Of those, what models are trained with: not inference's short or unequal sequences.
GRID_BACKWARD = GRID_OVER_LENGTHS | {
    name: GRID[name] for name in ("d96_4096", "d96_causal_4096", "d192_4096", "d192_causal_4096")
}

# Kinds of inputs, which verify/inputs.py draws. Of the normal ones by the logits' deviation.
NORMAL = {f"normal_{std}": std for std in (1, 2, 4, 8, 16)}
INPUTS = (*NORMAL, "later_keys_larger", "own_key", "first_key_sink", "equal_keys")
# And what `make train` keeps of a model, of this shape: one head of each layer.
TRAINED = "trained"
TRAINED_SHAPE = Shape(1, 6, 6, 1024, 1024, 64)


def _distributions() -> Iterator[tuple[str, tuple[Problem, str]]]:
    seq = 4096
    for head_dim, causal, dtype, inputs in product(
        (64, 128, 256), (False, True), ("bf16", "fp16"), INPUTS
    ):
        heads = HIDDEN // head_dim
        shape = Shape(TOKENS // seq, heads, heads, seq, seq, head_dim)
        name = f"d{head_dim}{'_causal' if causal else ''}_{dtype}_{inputs}"
        yield name, (Problem(shape, dtype, causal), inputs)
    # Repeated until there are as many rows of K, about, as in the cells above.
    rows = TOKENS * HIDDEN // TRAINED_SHAPE.head_dim
    shape = replace(TRAINED_SHAPE, batch=rows // (TRAINED_SHAPE.heads * TRAINED_SHAPE.seq_k))
    for dtype in ("bf16", "fp16"):
        name = f"d{shape.head_dim}_causal_{dtype}_{TRAINED}"
        yield name, (Problem(shape, dtype, causal=True), TRAINED)


DISTRIBUTIONS = dict(_distributions())  # by a cell's name: the problem and the kind of inputs
LATENCY = {
    f"n{seq}{'_causal' if causal else ''}": Problem(Shape(1, 16, 16, seq, seq, 128), "bf16", causal)
    for seq, causal in product((128, 256, 512, 1024), (False, True))
}
# Few queries on many keys: one for each sequence, as where a model writes, then some that are
# guessed ahead, and a short part of a prompt. Heads of Llama 3's 8 and 70 billion parameters, and
# heads with keys of their own.
DECODE = {
    f"d{head_dim}_b{batch}_h{heads}_kv{kv_heads}_q{seq_q}_{seq_k}": Problem(
        Shape(batch, heads, kv_heads, seq_q, seq_k, head_dim), "bf16"
    )
    for head_dim, seq_q, batch, (heads, kv_heads), seq_k in product(
        (64, 128, 256),
        (1, 4, 16, 128),
        (1, 8, 64),
        ((32, 8), (64, 8), (16, 16)),
        [1024 << doublings for doublings in range(8)],
    )
}
# One sequence over several GPUs: 16 heads of their own keys, and Llama 3's 64 query heads on 8.
SHARDED = {
    f"h{heads}{'_causal' if causal else ''}_{seq}": Problem(
        Shape(1, heads, kv_heads, seq, seq, 128), "bf16", causal
    )
    for seq, (heads, kv_heads), causal in product(
        (32768, 65536, 131072, 1048576), ((16, 16), (64, 8)), (False, True)
    )
}
