"""Problems: shape, dtype and mask of one call; the ones that are measured."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product

from .lengths import UNLIMITED


@dataclass(frozen=True)
class Shape:
    """head_dim is that of q and k; v and o have v_head_dim, the same one if None is given."""

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    head_dim: int
    v_head_dim: int | None = None

    def __post_init__(self) -> None:
        _default_v_head_dim(self)

    @property
    def q(self) -> tuple[int, ...]:
        return (self.batch, self.heads, self.seq_q, self.head_dim)

    @property
    def kv(self) -> tuple[int, ...]:
        """Of k, and of v where that has the same head_dim."""
        return (self.batch, self.kv_heads, self.seq_k, self.head_dim)

    @property
    def v(self) -> tuple[int, ...]:
        return (self.batch, self.kv_heads, self.seq_k, self.v_head_dim)

    @property
    def o(self) -> tuple[int, ...]:
        return (self.batch, self.heads, self.seq_q, self.v_head_dim)

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        head_dim = f"{self.head_dim}"
        if self.v_head_dim != self.head_dim:
            head_dim += f"/{self.v_head_dim}"
        return f"{self.batch}x{heads}x{self.seq_q}x{self.seq_k}x{head_dim}"


@dataclass(frozen=True)
class Specialization:
    """What a step is compiled for. dtype is "bf16", "fp16" or "fp32"; v_head_dim as in Shape."""

    head_dim: int
    dtype: str
    causal: bool
    v_head_dim: int | None = None

    def __post_init__(self) -> None:
        _default_v_head_dim(self)

    @property
    def defines(self) -> tuple[str, ...]:
        """For a compiler, nvcc or the host's."""
        return (
            f"-DHEAD_DIM={self.head_dim}",
            f"-DV_HEAD_DIM={self.v_head_dim}",
            f"-DELEMENT={self.dtype}",
            f"-DCAUSAL={int(self.causal)}",
        )

    def __str__(self) -> str:
        of_v = "" if self.v_head_dim == self.head_dim else f"_v{self.v_head_dim}"
        return f"d{self.head_dim}{of_v}_{self.dtype}{'_causal' if self.causal else ''}"


def _default_v_head_dim(of: Shape | Specialization) -> None:
    if of.v_head_dim is None:
        object.__setattr__(of, "v_head_dim", of.head_dim)  # which is how a frozen one is set


@dataclass(frozen=True)
class Problem:
    """dtype is "bf16", "fp16" or "fp32"; causal: the last query sees the last key."""

    shape: Shape
    dtype: str
    causal: bool = False

    @property
    def specialization(self) -> Specialization:
        shape = self.shape
        return Specialization(shape.head_dim, self.dtype, self.causal, shape.v_head_dim)

    def as_record(self) -> dict:
        """A record's shape. v_head_dim is there where it is another one than head_dim."""
        shape = asdict(self.shape)
        if self.shape.v_head_dim == self.shape.head_dim:
            del shape["v_head_dim"]
        return {**shape, "dtype": self.dtype, "causal": self.causal}


GROUPS = ("packed", "windows", "caches", "decoding")  # of Sequences
MOST_DECODED = 16  # queries of a sequence, where more are no decoding


@dataclass(frozen=True)
class Sequences:
    """One call on sequences with lengths of their own, or with a window of keys for each query.

    Packed, they lie one after another; otherwise all have as many queries, and as many keys, of
    which only the first seqused_k are there. window is (left, right), as common.lengths.Lengths has
    it. title says in words what the lengths are, group which of GROUPS it belongs to.
    """

    title: str
    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False
    window: tuple[int, int] = (UNLIMITED, UNLIMITED)
    packed: bool = True
    seqused_k: tuple[int, ...] | None = None
    dtype: str = "bf16"

    @property
    def shape(self) -> Shape:
        """Of the tensors: packed sequences are the rows of one batch."""
        batch = 1 if self.packed else len(self.seqlens_q)
        seq_q, seq_k = (sum(seqlens) // batch for seqlens in (self.seqlens_q, self.seqlens_k))
        return Shape(batch, self.heads, self.kv_heads, seq_q, seq_k, self.head_dim)

    @property
    def group(self) -> str:
        if self.seqused_k and max(self.seqlens_q) <= MOST_DECODED:
            return "decoding"
        if self.has_window:
            return "windows"
        return "packed" if self.packed else "caches"

    @property
    def has_window(self) -> bool:
        return self.window != (UNLIMITED, UNLIMITED)

    @property
    def are_equal(self) -> bool:
        """Whether they would be a batch without padding."""
        return len({*self.seqlens_q}) == len({*self.seqlens_k}) == 1

    @property
    def visible(self) -> int:
        """How many pairs of a query and a key that it sees there are, in each head."""
        left, right = self.window
        if self.causal:
            right = min(right, 0)
        total = 0
        for seq_q, seq_k in zip(self.seqlens_q, self.seqused_k or self.seqlens_k, strict=True):
            own = seq_k - seq_q  # the key of the first query, the next query has the next one
            behind = (own + right + 1, own - left)  # keys that it sees, and that its window leaves
            seen, left_behind = (
                _sum_of_clamped(first + seq_q, seq_k) - _sum_of_clamped(first, seq_k)
                for first in behind
            )
            total += seen - left_behind
        return total

    def flops(self, products: int) -> int:
        """Of so many products of matrices, a multiply-add counted as two."""
        return 2 * products * self.heads * self.head_dim * self.visible

    def as_record(self) -> dict:
        """What a record's cell says of it: no list of lengths, but what follows from them."""
        kept = ("title", "group", "heads", "kv_heads", "head_dim", "causal", "packed", "visible")
        return {
            **{key: getattr(self, key) for key in kept},
            "window": [None if side == UNLIMITED else side for side in self.window],
            "sequences": len(self.seqlens_q),
            "are_equal": self.are_equal,
            "queries": sum(self.seqlens_q),
            "keys": sum(self.seqused_k or self.seqlens_k),
            "most_queries": max(self.seqlens_q),
            "most_keys": max(self.seqused_k or self.seqlens_k),
        }


def _sum_of_clamped(end: int, most: int) -> int:
    """The sum of min(i, most) over i from 0 to before end."""
    below = min(max(end, 0), most)
    return below * (below - 1) // 2 + max(end - most, 0) * most


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


def _large_head_dims() -> Iterator[tuple[str, Problem]]:
    """As FlashAttention's convention, but that heads may be too few for the hidden size: 256, where
    most steps and peers stop, and beyond; then MLA's, where v has a head_dim of its own.
    """
    own = ((192, 128), (576, 512))  # of MLA in training, and as it decodes
    of_v = dict.fromkeys((256, 320, 384, 512, 576, 768, 1024))
    for (head_dim, v_head_dim), causal, seq in product(
        (*of_v.items(), *own), (False, True), (4096, 16384)
    ):
        heads = max(1, HIDDEN // head_dim)
        shape = Shape(TOKENS // seq, heads, heads, seq, seq, head_dim, v_head_dim)
        name = f"d{head_dim}{f'_v{v_head_dim}' if v_head_dim else ''}"
        yield f"{name}{'_causal' if causal else ''}_{seq}", Problem(shape, "bf16", causal)


LARGE_HEAD_DIMS = dict(_large_head_dims())
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


def _lengths() -> Iterator[tuple[str, Sequences]]:
    """Packed, without and with a causal mask; with windows; on caches of keys that are not full,
    some of them with few queries.

    At head_dim 64 and 128 with heads of their own keys; some of them with Llama 3's 32 query heads
    on 8, and at head_dim 256.
    """
    rng = random.Random(1)

    def drawn(count: int, least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.randint(least, most) for _ in range(count))

    packed = {
        "4x4096": ("4 of 4096", (4096,) * 4),
        "1x16384": ("1 of 16384", (16384,)),
        "ragged": ("16 of 100 to 4000", drawn(16, 100, 4000)),
        "short": ("128 of 20 to 400", drawn(128, 20, 400)),
        "one_long": ("1 of 30000 and 30 of 50 to 500", (30000, *drawn(30, 50, 500))),
        "tiny": ("1000 of 1 to 100", drawn(1000, 1, 100)),
    }
    used, unequal = drawn(8, 1024, 8192), drawn(64, 100, 4096)
    decoding = {
        "64": ("a batch of 64 of 1, on 100 to 4096 keys", 1, unequal, 4096),
        "8": ("a batch of 8 of 1, on 1024 to 8192 keys", 1, used, 8192),
        "8_of_4": ("a batch of 8 of 4, on 1024 to 8192 keys", 4, used, 8192),
        "1": ("a batch of 1 of 1, on 40000 of 131072 keys", 1, (40000,), 131072),
        "1_of_16": ("a batch of 1 of 16, on 16000 of 16384 keys", 16, (16000,), 16384),
    }
    some = ("4x4096", "ragged", "one_long", "window_1023", "window_256_256", "ragged_window_511")
    for head_dim, heads, kv_heads in ((64, 32, 32), (128, 16, 16), (128, 32, 8), (256, 8, 8)):
        of_heads = partial(Sequences, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        batch = partial(of_heads, packed=False)
        cells = {
            f"{what}{'_causal' if causal else ''}": of_heads(title, seqlens, seqlens, causal=causal)
            for (what, (title, seqlens)), causal in product(packed.items(), (False, True))
        }
        for left in (127, 1023, 4095):
            seqlens, window = (16384,), (left, UNLIMITED)
            cells[f"window_{left}_causal"] = batch(
                "a batch of 1 of 16384", seqlens, seqlens, causal=True, window=window
            )
        seqlens = (4096,) * 4
        cells["window_256_256"] = batch("a batch of 4 of 4096", seqlens, seqlens, window=(256, 256))
        cells["ragged_window_511_causal"] = replace(cells["ragged_causal"], window=(511, UNLIMITED))
        cells["caches_causal"] = batch(
            "a batch of 8 of 1024, on 1024 to 8192 keys",
            (1024,) * 8,
            (8192,) * 8,
            causal=True,
            seqused_k=used,
        )
        for what, (title, seq_q, seqused_k, seq_k) in decoding.items():
            count = len(seqused_k)
            cells[f"decode_{what}_causal"] = batch(
                title, (seq_q,) * count, (seq_k,) * count, causal=True, seqused_k=seqused_k
            )
        cells["decode_8_window_1023_causal"] = replace(
            cells["decode_8_causal"], window=(1023, UNLIMITED)
        )
        name = f"d{head_dim}_h{heads}{'' if heads == kv_heads else f'_kv{kv_heads}'}"
        all_of_them = heads == kv_heads and head_dim < 256
        for what, sequences in cells.items():
            if all_of_them or what.removesuffix("_causal") in (*some, "caches") or "decode" in what:
                yield f"{name}_{what}", sequences


LENGTHS = dict(_lengths())  # by a cell's name
# Of those, what models are trained with.
LENGTHS_BACKWARD = {
    name: sequences for name, sequences in LENGTHS.items() if not sequences.seqused_k
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
