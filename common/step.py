"""A step is one .cu file that describes itself."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .errors import UsageError
from .lengths import Lengths
from .operation import FORWARD, OPERATIONS, Operation, operation_of
from .problem import Specialization
from .source import code_sha256

# The ladders' letters. The first is implied where a step is named by its number alone.
LETTERS = "".join(OPERATIONS)
DTYPES = ("bf16", "fp16", "fp32")
# Compute capabilities that nvcc of CUDA 13 knows. From 9.0 on, an "a" after the number admits
# instructions that only this architecture has.
ARCHITECTURES = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)
FIRST_EXACT_ARCHITECTURE = 90

_LIMITS = re.compile(
    r"(?P<dtypes>[a-z]\w*(?:, [a-z]\w*)*); "
    r"head_dim (?P<lowest>\d+)-(?P<highest>\d+) by (?P<multiple>\d+)(?P<of_v>, v's may differ)?; "
    r"sm_(?P<arch>\d+)(?P<exact>a?)\b"
    r"(; more than \d+ KiB of shared memory from head_dim (?P<large_smem>\d+) on)?"
)

# What a step may be taken for only: few_of() says which of them a call is.
FEW_HEADS = "for few queries of few heads"
FEW_ROWS, FEWEST_ROWS = "for few rows", "for the fewest rows"
FEW_QUERIES, FEW_WORK_TILES = "for few queries", "for few work tiles"
# None begins as one before it does.
_FEW = FEW_HEADS, FEW_ROWS, FEWEST_ROWS, FEW_QUERIES, FEW_WORK_TILES
_FEW_WITH_LENGTHS = "for few queries with lengths or windows"  # a condition of both kinds
_DIVISORS = re.compile(r'^#include "attention_divisors\.cuh"', re.MULTILINE)
_LENGTHS, _LENGTHS_LEFT = (
    "for lengths and windows",
    "for lengths and windows that no other step takes",
)
_TAKEN = re.compile(
    rf"only (?P<condition>with deterministic=True|{'|'.join(_FEW)}"
    rf"|{_LENGTHS}|{_LENGTHS_LEFT}|{_FEW_WITH_LENGTHS}|for large head_dim); \S"
)
_REPEATS = re.compile(r"all bits but (?P<outputs>\w+(?:'s, \w+)*)'s; \S")
_REPEATS_ON_ONE_GPU = re.compile(r"all bits on as many multiprocessors; \S")
_PARTS = re.compile(
    r"(?P<products>\w+) adds to workspace (?P<sums>\d), any number of times between "
    r"(?P<begin>\w+) and (?P<finish>\w+)"
)

HEAD_DIMS = range(8, 1025, 8)  # those that the cases of verify/ cover: a step can promise no others
LARGE_HEAD_DIM = 256  # a larger head_dim is large; so is one that v does not share
MULTIPROCESSORS = 132  # of an H100 or H200
# What are_few_keys() and are_few_rows() reckon with: the rows of v18's work tile; the keys of one
# of its tiles, up to a head_dim; how many it computes on its own as quickly as other steps share
# them out (and two of v19's blocks, above that head_dim); and how much of up to so many parts one
# block of an H200 merges as quickly as v13's second kernel does. Of more parts it is half as much.
TILE_ROWS, TILE_KEYS, TILE_DIM, WHOLE_KEYS = 32, 128, 128, 1024
MERGED_ELEMENTS, FEW_PARTS = 2**16, 16
# The rows of v20's work tile; two of these read the same keys sooner than one of v18's, where, up
# to SMALL_DIM, the K of a head has SHORT_ELEMENTS at most and that of all heads ALL_SHORT_ELEMENTS,
# or, with more columns, the latter ALL_SHORT_WIDE and each of the two has a multiprocessor.
# With more than HALF_ROWS one of v18's was sooner done above WIDE_DIM, where the K of all heads has
# WIDE_ELEMENTS at most; and v12 above TILE_DIM, from LONG_KEYS on, where they are one full round of
# heads that share none.
FEWEST, SHORT_ELEMENTS, ALL_SHORT_ELEMENTS, ALL_SHORT_WIDE = 16, 2**19, 2**23, 2**21
HALF_ROWS, WIDE_DIM, WIDE_ELEMENTS, LONG_KEYS = 8, 192, 2**28, 8192
WARPGROUP_ROWS = 64  # of a warpgroup, in every step
# And are_of_few_heads(): the rows of v19's work tile, how many blocks may share its keys, and how
# many of these run at once. Where idle multiprocessors could have taken more than UNSHARED_KEYS
# keys off each block, or UNSHARED_WIDE above TILE_DIM, v13 was faster. v20 was, with so few rows of
# so few elements, where teams are smaller than the first or have more than SMALL_KEYS keys for each
# block; with more elements, where both hold; and with more than SMALL_KEYS for each block, up to
# SMALL_DIM, also with two of its work tiles; and v17 or v13, with more than MERGED_ROWS and more
# than TEAM_KEYS.
TEAM_ROWS, TEAMS, TEAM_BLOCKS, UNSHARED_KEYS, UNSHARED_WIDE = 64, (8, 4, 2), 112, 540, 400
SMALL_ROWS, SMALL_ELEMENTS, SMALL_KEYS, SMALL_DIM = 16, 2**10, 256, 64
TEAM_KEYS = 1024
# And are_few(). From 640 to 896 IDLE_KEYS calls took as long on an H100, in the geometric mean, and
# longer with 512 or 1024.
BLOCK_QUERIES, MERGED_ROWS, IDLE_KEYS = 128, 128, 768
PACKED_KEYS = 2048  # and are_faster_together(): v12 was faster with 1024
# And _are_idle(): with a causal mask and a second round v12 was faster with 1900 keys, and slower
# with 4500, which were at least so many times as many as the queries.
SECOND_ROUND_KEYS, SECOND_ROUND_RATIO = 3072, 4
UNEQUAL_KEYS = 2048  # and few_with()
# And few_of(). Up to this head_dim a work tile of v12 or v17 has BLOCK_QUERIES and a half. v17 was
# faster than v12 from 2048 keys on, with 32 and with 64 work tiles, and with 1024 slower; and v13
# faster than v17 with up to so many, where only two of three warpgroups have queries.
THREE_WARPGROUPS_DIM, IDLE_KEYS_OF_TILES, TWO_WARPGROUPS_KEYS = 96, 960, 4096
# Beside v12's shares v17 was faster from so many elements of a head's K on, in so many rounds.
SHARED_ELEMENTS, SHARED_ROUNDS = 2**20, 4
# Where nothing is read twice it was faster with so many, in any number of rounds, but on an H200
# not with more; and faster than v13, too, above TILE_DIM, where two warpgroups compute.
EVEN_PARTS_ELEMENTS = range(2**18, 2**22)
# And in one to SHARED_ROUNDS full rounds of up to so many queries and keys: it starts and ends
# sooner. (On an H100, with head_dim 64 and heads that share nothing, v12 was 0.5 % faster.)
EVEN_PARTS_QUERIES, EVEN_PARTS_KEYS = 512, 2048


@dataclass(frozen=True)
class Limits:
    """The step's `limits:` line, e.g. `bf16, fp16, fp32; head_dim 8-256 by 8; sm_75`."""

    dtypes: tuple[str, ...]
    lowest_head_dim: int
    highest_head_dim: int
    head_dim_multiple: int
    arch: str  # lowest architecture; a trailing "a" means exactly that one
    # From this head_dim on, not every architecture from there up has shared memory enough.
    large_smem_head_dim: int | None = None
    v_may_differ: bool = False  # v, and o, may have another head_dim, of the same ones

    def refusal(self, spec: Specialization) -> str | None:
        """Why these limits exclude spec, or None."""
        if spec.dtype not in self.dtypes:
            return f"takes {', '.join(self.dtypes)}, not {spec.dtype}"
        low, high, by = self.lowest_head_dim, self.highest_head_dim, self.head_dim_multiple
        for head_dim in (spec.head_dim, spec.v_head_dim):
            if not low <= head_dim <= high or head_dim % by:
                return f"takes head_dim {low} to {high} in multiples of {by}, not {head_dim}"
        if spec.v_head_dim != spec.head_dim and not self.v_may_differ:
            is_narrower = spec.v_head_dim < spec.head_dim
            padded = "v with zeros" if is_narrower else "q and k with zeros and give softmax_scale"
            return (
                f"takes v of q's head_dim, {spec.head_dim}, not of {spec.v_head_dim}: pad {padded}"
            )
        return None

    def arch_refusal(self, capability: tuple[int, int]) -> str | None:
        """Why these limits exclude a device of that compute capability, or None."""
        major, minor = capability
        number = int(self.arch[3:].rstrip("a"))
        exact = self.arch.endswith("a")
        if (exact and number != 10 * major + minor) or number > 10 * major + minor:
            return (
                f"needs {'exactly ' if exact else ''}{self.arch}; this device is sm_{major}{minor}"
            )
        return None


@dataclass(frozen=True)
class Parts:
    """The step's `parts:` line: how its kernels compute gradients of the keys in several parts.

    For the same queries `begin` and `finish` are launched once, and in between `products` for each
    part, with its keys. What `begin` leaves in workspaces does not depend on the keys, or on the
    mask; of what `products` changes there, only its sums of dQ are to stay.
    """

    begin: str
    products: str
    finish: str
    sums: int  # the workspace


@dataclass(frozen=True)
class Step:
    """One .cu file: name "v04", its path, and what the file's first lines say of it."""

    name: str
    path: Path
    title: str
    change: str
    why: str
    limits: Limits
    draft: str | None  # why attention() does not take the step yet
    only_deterministic: bool  # attention() takes the step only where all bits must repeat
    few: str | None  # attention() takes the step only where few_of(), or few_with(), is this
    only_large_head_dim: bool  # attention() takes the step only where head_dim is_large()
    takes_lengths: bool  # its kernels take Lengths; attention() takes it only where they are given,
    only_left_over: bool  # and then only where it takes none of the others
    takes_divisors: bool  # its kernels take Divisors
    unordered: tuple[str, ...]  # outputs whose last bits differ from run to run
    by_multiprocessors: bool  # the last bits differ from one number of multiprocessors to another
    parts: Parts | None  # where its kernels can be launched for one part of the keys after another
    code_sha256: str  # of its code and its headers', without comments

    @property
    def operation(self) -> Operation:
        """What the step computes, by the letter of its name."""
        return operation_of(self.name)

    @property
    def is_general(self) -> bool:
        """Whether attention() takes the step however many queries there are, without lengths or a
        window, and with no large head_dim.
        """
        return not (self.few or self.only_large_head_dim or self.takes_lengths)

    def is_candidate(self, deterministic: bool = False) -> bool:
        """Whether attention() takes the step, which is_general, unless a higher one runs, without
        being told to.
        """
        if self.draft or not self.is_general:
            return False
        return not (self.unordered if deterministic else self.only_deterministic)

    def require(self, spec: Specialization) -> None:
        """Raises UsageError where the step cannot run spec."""
        if reason := self.limits.refusal(spec):
            raise UsageError(f"{self.name} {reason}")


def are_few_keys(
    batch: int, heads: int, kv_heads: int, seq_q: int, seq_k: int, head_dim: int
) -> bool:
    """Whether keys are so few that v18, which no other step is as quick to start as, need not cut
    them.

    They are, where each of its work tiles has a multiprocessor, and a tile of keys; or up to
    WHOLE_KEYS, where they keep nine tenths of MULTIPROCESSORS busy. Above TILE_DIM only the latter,
    of more queries than one of v12's warpgroups has.
    """
    work = _work_tiles(batch, heads, kv_heads, seq_q, TILE_ROWS)
    if work > MULTIPROCESSORS:
        return False
    if head_dim <= TILE_DIM and seq_k <= TILE_KEYS:
        return True
    are_whole = 10 * work >= 9 * MULTIPROCESSORS and seq_k <= WHOLE_KEYS
    return are_whole and (head_dim <= TILE_DIM or seq_q > WARPGROUP_ROWS)


def are_of_few_heads(
    batch: int, heads: int, kv_heads: int, seq_q: int, seq_k: int, head_dim: int
) -> bool:
    """Whether the queries of heads that share keys are so few work tiles that v19 is faster than
    v20, v18, v13, v17 and v12.

    They are, where each can have a team of two blocks or more, or four with a larger head_dim than
    TILE_DIM, and no block more than TILE_KEYS. Or where it has more (with such a head_dim two
    blocks have WHOLE_KEYS at most), unless the multiprocessors without a team would be idle for too
    long, v20's parts are very small and a team is smaller than a cluster or has more than
    SMALL_KEYS for each block, they are of SMALL_ROWS rows at most and both hold, or more than
    MERGED_ROWS share more than TEAM_KEYS for a block.
    """
    work = _work_tiles(batch, heads, kv_heads, seq_q, TEAM_ROWS)
    for team in TEAMS:
        if work * team <= TEAM_BLOCKS:
            break
    else:
        return False
    if head_dim > TILE_DIM and team == 2 and not TILE_KEYS * team < seq_k <= WHOLE_KEYS:
        return False
    if seq_k <= TILE_KEYS * team:
        return True
    are_small = _share_a_head(heads, kv_heads, seq_q, SMALL_ROWS)
    are_very_small = are_small and seq_q * heads * head_dim <= SMALL_ELEMENTS * kv_heads
    is_smaller, has_more = team < TEAMS[0], seq_k > SMALL_KEYS * team
    if are_very_small:
        is_v20s = has_more or is_smaller
    else:
        are_short = head_dim <= SMALL_DIM and _are_short(batch, kv_heads, seq_k, head_dim)
        is_v20s = has_more and (are_short or (are_small and is_smaller))
    if is_v20s and are_few_rows(batch, heads, kv_heads, seq_q, head_dim):
        return False
    if seq_k > TEAM_KEYS * team and not _share_a_head(heads, kv_heads, seq_q, MERGED_ROWS):
        return False
    idle = MULTIPROCESSORS - work * team
    unshared = UNSHARED_KEYS if head_dim <= TILE_DIM else UNSHARED_WIDE
    return idle * seq_k <= MULTIPROCESSORS * unshared * team


def _share_a_head(heads: int, kv_heads: int, seq_q: int, rows: int) -> bool:
    """Whether at most so many rows share a head of keys: without a division by what is refused
    later, if it is 0.
    """
    return seq_q * heads <= rows * kv_heads


def _work_tiles(batch: int, heads: int, kv_heads: int, seq_q: int, tile_rows: int) -> int:
    """How many there are, each of up to tile_rows of the rows that share a head of keys."""
    return batch * kv_heads * -(-seq_q * heads // (tile_rows * max(1, kv_heads)))


def are_few_rows(batch: int, heads: int, kv_heads: int, seq_q: int, head_dim: int) -> bool:
    """Whether the queries of heads that share keys are so few that v18 or v20 is faster than v13,
    or nearly so, and, but for what _few_rows() excepts, than v12.

    They are one work tile's, of TILE_ROWS at most; and where there are parts, on as many blocks as
    there are multiprocessors for each head of keys, these have MERGED_ELEMENTS at most, or half as
    many where they are more than FEW_PARTS.
    """
    if not _share_a_head(heads, kv_heads, seq_q, TILE_ROWS):
        return False
    parts = MULTIPROCESSORS // max(1, batch * kv_heads)
    merged = seq_q * heads * head_dim * parts  # elements, of all heads
    most = MERGED_ELEMENTS if parts <= FEW_PARTS else MERGED_ELEMENTS // 2
    return parts < 2 or merged <= most * kv_heads


def _are_short(batch: int, kv_heads: int, seq_k: int, head_dim: int) -> bool:
    """Whether keys are so few that up to TILE_ROWS rows on them are v20's, and not v18's."""
    elements = seq_k * head_dim  # of a head's K
    all_elements = batch * kv_heads * elements
    if head_dim > SMALL_DIM:  # and each of the two work tiles has a multiprocessor
        return all_elements <= ALL_SHORT_WIDE and 2 * batch * kv_heads <= MULTIPROCESSORS
    return elements <= SHORT_ELEMENTS and all_elements <= ALL_SHORT_ELEMENTS


def _few_rows(
    batch: int, heads: int, kv_heads: int, seq_q: int, seq_k: int, head_dim: int, causal: bool
) -> str | None:
    """Which of v20 and v18 takes rows that are few; or None, where v12 is faster than both: of more
    than HALF_ROWS and columns than TILE_DIM, a full round of heads that share no keys, LONG_KEYS or
    more, without a causal mask.
    """
    is_half = _share_a_head(heads, kv_heads, seq_q, HALF_ROWS)
    if is_half or _are_short(batch, kv_heads, seq_k, head_dim):
        return FEWEST_ROWS
    are_long = heads == kv_heads and seq_k >= LONG_KEYS and head_dim > TILE_DIM and not causal
    if are_long and _full_rounds(_work_tiles_alone(batch, heads, seq_q)) == 1:
        return None
    elements = batch * kv_heads * seq_k * head_dim  # of all K
    is_v18s = head_dim > WIDE_DIM and elements <= WIDE_ELEMENTS
    is_v18s |= not _share_a_head(heads, kv_heads, seq_q, FEWEST)
    return FEW_ROWS if is_v18s else FEWEST_ROWS


def are_few(batch: int, heads: int, kv_heads: int, seq_q: int, seq_k: int) -> bool:
    """Whether queries are few for the keys that they see: v16 is faster there than v14.

    Those of heads that share keys are, where they are MERGED_ROWS at most, together: the keys are
    then read once. All are, where v14, a block of which takes BLOCK_QUERIES of a head through all
    keys, leaves a quarter of MULTIPROCESSORS or more without work, and for so long that it is worth
    splitting the keys and merging the parts: as long as IDLE_KEYS keys take on all of them.
    """
    if heads > kv_heads and _share_a_head(heads, kv_heads, seq_q, MERGED_ROWS):
        return True
    return _are_idle(_work_tiles_alone(batch, heads, seq_q), seq_k, IDLE_KEYS)


def are_faster_together(together: int, alone: int, seq_k: int, are_merged: bool) -> bool:
    """Whether v13, for which the rows that share keys are so many work tiles, is faster than v12,
    for which each head's are on their own: it reads the keys less often.

    They must be half as many, at most; and there must be PACKED_KEYS, or more than a round of v12's
    where v13 reads each key once, as the rows are MERGED_ROWS at most; or three of its rounds for
    one of v13's.
    """
    if 2 * together > alone:
        return False
    if seq_k >= PACKED_KEYS or (are_merged and alone > MULTIPROCESSORS):
        return True
    return 3 * -(-together // MULTIPROCESSORS) <= -(-alone // MULTIPROCESSORS)


def _work_tiles_alone(batch: int, heads: int, seq_q: int) -> int:
    """How many there are, each of up to BLOCK_QUERIES of one head."""
    return batch * heads * -(-seq_q // BLOCK_QUERIES)


def _are_idle(work: int, seq_k: int, idle_keys: int, rounds: int = 1) -> bool:
    """Whether a step that does not cut keys has too few work tiles for so many rounds, one or two:
    a quarter of their places is empty, or more, and for as long as idle_keys take on all
    multiprocessors, or SECOND_ROUND_KEYS.
    """
    places = rounds * MULTIPROCESSORS
    idle = places - work
    keys = idle_keys if rounds == 1 else SECOND_ROUND_KEYS
    return 4 * idle >= places and idle * seq_k >= MULTIPROCESSORS * keys


def _full_rounds(work: int) -> int:
    """The rounds of so many work tiles, if they keep nine tenths of MULTIPROCESSORS busy, or 0."""
    rounds = -(-work // MULTIPROCESSORS)
    return rounds if 10 * work >= 9 * rounds * MULTIPROCESSORS else 0


@lru_cache(maxsize=1024)  # the layers of a model, and its next words, make the same calls
def few_of(
    batch: int, heads: int, kv_heads: int, seq_q: int, seq_k: int, head_dim: int, causal: bool
) -> str | None:
    """What such a call has few of, or None: FEWEST_ROWS, or FEW_ROWS (or keys); FEW_HEADS;
    FEW_QUERIES, of up to MERGED_ROWS that share keys, or more where heads have fewer work tiles
    together than alone, or where v17 would have a warpgroup without any; or else FEW_WORK_TILES,
    which v17 takes: of more rows, or of heads that share nothing above TILE_DIM, or where v12 would
    share out full rounds, or all rounds are full, few and short.
    """
    if are_few_keys(batch, heads, kv_heads, seq_q, seq_k, head_dim):
        return FEWEST_ROWS if _share_a_head(heads, kv_heads, seq_q, FEWEST) else FEW_ROWS
    if are_of_few_heads(batch, heads, kv_heads, seq_q, seq_k, head_dim):
        return FEW_HEADS
    if are_few_rows(batch, heads, kv_heads, seq_q, head_dim):
        return _few_rows(batch, heads, kv_heads, seq_q, seq_k, head_dim, causal)
    is_wide = head_dim > THREE_WARPGROUPS_DIM
    work = batch * heads * -(-seq_q // (BLOCK_QUERIES if is_wide else 3 * BLOCK_QUERIES // 2))
    # With a causal mask v12 shares nothing out. If the work tiles are about as long as each other,
    # that leaves a second round as empty as a first one.
    is_in_two = causal and work > MULTIPROCESSORS and SECOND_ROUND_RATIO * seq_q <= seq_k
    rounds = 2 if is_in_two else 1
    are_merged = _share_a_head(heads, kv_heads, seq_q, MERGED_ROWS)
    alone = _work_tiles_alone(batch, heads, seq_q)
    together = _work_tiles(batch, heads, kv_heads, seq_q, MERGED_ROWS)
    are_fewer = 4 * together <= 3 * alone
    elements = seq_k * head_dim  # of a head's K
    if (are_merged or are_fewer) and _are_idle(work, seq_k, IDLE_KEYS, rounds):
        is_alone = heads == kv_heads and seq_q > WARPGROUP_ROWS and head_dim > TILE_DIM
        return FEW_WORK_TILES if is_alone and elements in EVEN_PARTS_ELEMENTS else FEW_QUERIES
    if are_faster_together(together, alone, seq_k, are_merged):
        return FEW_QUERIES
    two_compute = is_wide or seq_q <= BLOCK_QUERIES  # of three warpgroups, or of two
    full_rounds = 0 if causal else _full_rounds(work)
    are_few_rounds = two_compute and 0 < full_rounds <= SHARED_ROUNDS
    if are_few_rounds and seq_q <= EVEN_PARTS_QUERIES and seq_k <= EVEN_PARTS_KEYS:
        return FEW_WORK_TILES
    if are_merged:
        # Few only where v12, which shares out their keys, reads these more slowly than v17.
        is_shared = is_wide and full_rounds > 1
        return FEW_WORK_TILES if is_shared and elements in EVEN_PARTS_ELEMENTS else None
    if _are_idle(work, seq_k, IDLE_KEYS_OF_TILES, rounds):
        is_half_idle = two_compute and not is_wide and seq_k <= TWO_WARPGROUPS_KEYS
        return FEW_QUERIES if is_half_idle else FEW_WORK_TILES
    # Or v12 shares out the work tiles of a few rounds, and takes those that look at the same keys
    # out of step. With three warpgroups at work it computes for so long that this does not matter.
    is_shared = are_few_rounds and full_rounds > 1 and elements >= SHARED_ELEMENTS
    return FEW_WORK_TILES if is_shared else None


def few_with(
    lengths: Lengths, batch: int, heads: int, kv_heads: int, seq_q: int, seq_k: int
) -> str | None:
    """What a call with these lengths has few of: FEW_QUERIES, where v16 is faster than v14, or
    nothing.

    The sizes are those of the tensors: the host does not know how long sequences are. A batch's may
    have all keys, and packed ones are reckoned as equally long. With UNEQUAL_KEYS or more, heads
    need not share keys: v14 would wait for the longest sequence.
    """
    sequences = lengths.num_sequences(batch)
    queries, keys = (-(-batch * rows // sequences) for rows in (seq_q, seq_k))
    may_differ = lengths.cu_seqlens_k is not None or lengths.seqused_k is not None
    are_merged = _share_a_head(heads, kv_heads, queries, MERGED_ROWS)
    if may_differ and keys >= UNEQUAL_KEYS and are_merged:
        return FEW_QUERIES
    keys = min(keys, queries + lengths.window_left + lengths.window_right)
    return FEW_QUERIES if are_few(sequences, heads, kv_heads, queries, keys) else None


def is_large(head_dim: int, v_head_dim: int) -> bool:
    """Whether head_dim is large: above LARGE_HEAD_DIM, or one that v does not share."""
    return head_dim > LARGE_HEAD_DIM or v_head_dim != head_dim


def predecessor(step: Step, steps: Iterable[Step]) -> Step | None:
    """The step of the same ladder that this one changes: the highest below it, of these.

    Those that attention() takes only for deterministic=True, only for few rows, queries, heads or
    work tiles, only for large head_dim, or only for lengths and windows, are passed over: nothing
    builds on them.
    """
    ladder = [each for each in steps if each.operation == step.operation]
    below = [
        each
        for each in ladder
        if each.name < step.name and each.is_general and not each.only_deterministic
    ]
    return max(below, key=lambda each: each.name, default=None)


def read_step(path: Path) -> Step:
    """Parses the header comment of a step's file: title line, change:, why:, limits:; draft:
    where attention() is not to take it yet; taken: where it is to take it only if asked for the
    same bits each time, only for few rows, queries, heads or work tiles, only for large head_dim,
    or only for lengths and windows; repeats: where a repeated call may give other bits, or another
    GPU; and parts: where its kernels can be launched for one part of the keys after another.

    Raises UsageError where the file cannot be read or says something else.
    """
    try:
        source = path.read_text(encoding="utf-8")
        sha256 = code_sha256(path)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    header: list[str] = []
    for line in source.splitlines():
        if not line.startswith("//"):
            break
        header.append(line[2:].strip())
    title = re.fullmatch(r"(\w+) -- (.+)", header[0]) if header else None
    if not title:
        raise UsageError(f"{path}: the first line must read '// v04 -- title'")
    fields: dict[str, str] = {}
    key = None
    for line in header[1:]:
        if found := re.match(r"(change|why|limits|draft|taken|repeats|parts): *(.*)", line):
            key = found[1]
            fields[key] = found[2]
        elif line and key:
            fields[key] += " " + line
        else:
            key = None
    for name in ("change", "why", "limits"):
        if name not in fields:
            raise UsageError(f"{path}: no '// {name}:' line in the header comment")
    if fields.get("draft") == "":
        raise UsageError(f"{path}: 'draft:' must say why, as in 'draft: no GPU has run it'")
    taken = _parse_taken(path, title[1], fields.get("taken"))
    return Step(
        name=title[1],
        path=path,
        title=title[2],
        change=fields["change"],
        why=fields["why"],
        limits=_parse_limits(path, fields["limits"]),
        draft=fields.get("draft"),
        only_deterministic=taken == "with deterministic=True",
        few=next((few for few in _FEW if taken.startswith(few)), None),
        only_large_head_dim=taken == "for large head_dim",
        takes_lengths=taken in (_LENGTHS, _LENGTHS_LEFT, _FEW_WITH_LENGTHS),
        only_left_over=taken == _LENGTHS_LEFT,
        takes_divisors=_DIVISORS.search(source) is not None,
        unordered=_parse_repeats(path, title[1], fields.get("repeats")),
        by_multiprocessors=_REPEATS_ON_ONE_GPU.match(fields.get("repeats", "")) is not None,
        parts=_parse_parts(path, title[1], fields.get("parts")),
        code_sha256=sha256,
    )


def _parse_taken(path: Path, name: str, text: str | None) -> str:
    """The condition of a `taken:` line, which reads "only condition; why"; "" without one."""
    if text is None:
        return ""
    found = _TAKEN.match(text)
    if found and (not found["condition"].startswith("for few") or operation_of(name) == FORWARD):
        return found["condition"]
    raise UsageError(
        f'{path}: \'taken:\' must read like "only with deterministic=True; why", "only for '
        f'lengths and windows; why", "only for lengths and windows that no other step takes; why", '
        f'"only for large head_dim; why" or, of a forward step, "only for few rows; why", "only '
        f'for few queries; why", "only for few queries of few heads; why", "only for few work '
        f'tiles; why" or "only for few queries with lengths or windows; why", not \'{text}\''
    )


def _parse_repeats(path: Path, name: str, text: str | None) -> tuple[str, ...]:
    """Parses a `repeats:` line, e.g. "all bits but dq's; blocks add to it in any order".

    One that begins "all bits on as many multiprocessors; " names no outputs.
    """
    if text is None or _REPEATS_ON_ONE_GPU.match(text):
        return ()
    outputs = [output.name for output in operation_of(name).outputs]
    found = _REPEATS.match(text)
    named = tuple(found["outputs"].split("'s, ")) if found else ()
    if not found or not set(named) <= set(outputs):
        raise UsageError(
            f"{path}: 'repeats:' must read like \"all bits but {outputs[0]}'s; why\" and name some "
            f'of {", ".join(outputs)}, or like "all bits on as many multiprocessors; why", '
            f"not '{text}'"
        )
    return named


def _parse_parts(path: Path, name: str, text: str | None) -> Parts | None:
    """Parses a `parts:` line: "kernel adds to workspace 1, any number of times between kernel and
    kernel".
    """
    if text is None:
        return None
    found = _PARTS.fullmatch(text)
    workspaces = operation_of(name).workspaces
    if not found or int(found["sums"]) >= workspaces:
        raise UsageError(
            f"{path}: 'parts:' must read like \"attention_backward adds to workspace 1, any number "
            f'of times between attention_delta and attention_round" and name one of workspaces 0 '
            f"to {workspaces - 1}, not '{text}'"
        )
    return Parts(found["begin"], found["products"], found["finish"], int(found["sums"]))


def _parse_limits(path: Path, text: str) -> Limits:
    """Parses a `limits:` line. The architecture may be followed by
    "; more than 99 KiB of shared memory from head_dim 160 on"; the rest is for the reader.
    """
    found = _LIMITS.match(text)
    if not found:
        raise UsageError(
            f"{path}: 'limits:' must read like 'bf16, fp16; head_dim 8-256 by 8; sm_80' or '... by "
            f"8, v's may differ; sm_90a', not '{text}'"
        )
    dtypes = tuple(found["dtypes"].split(", "))
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise UsageError(f"{path}: 'limits:' can name {', '.join(DTYPES)}, not {dtype}")
    low, high, by = (int(found[name]) for name in ("lowest", "highest", "multiple"))
    if not 0 < by <= low <= high or low % by or high % by:
        raise UsageError(
            f"{path}: 'limits:' must give head_dim from a lowest to a highest multiple of a step, "
            f"not {low}-{high} by {by}"
        )
    if low not in HEAD_DIMS or high not in HEAD_DIMS or by % HEAD_DIMS.step:
        raise UsageError(
            f"{path}: 'limits:' can promise head_dim {HEAD_DIMS[0]}-{HEAD_DIMS[-1]} by "
            f"{HEAD_DIMS.step}, which the cases cover, not {low}-{high} by {by}"
        )
    number = int(found["arch"])
    if number not in ARCHITECTURES or (found["exact"] and number < FIRST_EXACT_ARCHITECTURE):
        known = ", ".join(f"sm_{known}" for known in ARCHITECTURES)
        raise UsageError(
            f"{path}: 'limits:' can name {known}, from sm_{FIRST_EXACT_ARCHITECTURE} on also with "
            f"a trailing 'a', not sm_{number}{found['exact']}"
        )
    return Limits(
        dtypes,
        low,
        high,
        by,
        f"sm_{number}{found['exact']}",
        int(found["large_smem"]) if found["large_smem"] else None,
        found["of_v"] is not None,
    )
