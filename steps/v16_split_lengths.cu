// v16 -- split lengths: all blocks share the keys that there are, of few queries of each sequence
// taken: only for few queries with lengths or windows; for more, v14's tensor cores are busier
// change: v13's shares of v14's sequences. How many tiles of keys a sequence's queries see is only known
//     on the device: a warp of each block adds them up, and finds the sequence where its block's share
//     begins. A block tells the second kernel of the work tile that it has the beginning of, and other
//     blocks the rest: that kernel knows of no sequences
// why: a cache of keys is longer than what has been written to it, and each sequence's has another
//     length. v14 gives a head's keys to one block: with one query most SMs have none, and all wait for
//     the longest sequence. Predicted: v13's time on as many keys, however they are spread, and 1 to 2 us
//     for adding up
// repeats: all bits on as many multiprocessors; their number decides where the keys are cut
// limits: bf16, fp16; head_dim 8-256 by 8; sm_90a
#include "attention_lengths.cuh"
#include "copy.cuh"
#include "dependent_launch.cuh"
#include "mma.cuh"
#include "ragged.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

constexpr int CONSUMERS = 2;  // warpgroups that compute; one more copies
constexpr int NUM_THREADS = 128 * (CONSUMERS + 1);
constexpr int PRODUCER_WARP = 4 * CONSUMERS;  // starts the copies of K and V; the next ones copy Q
constexpr int Q_WARPS = 3;
constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 224;
constexpr int BLOCK_M = 64;                          // rows of a warpgroup
constexpr int BLOCK_N = HEAD_DIM <= 128 ? 128 : 64;  // keys of a tile
constexpr int NUM_STAGES = 2;                        // tiles of K, and of V, in shared memory
constexpr int Q_TILES = HEAD_DIM <= 192 ? 4 : 2;     // of Q, BLOCK_M rows each
// Two warpgroups multiply in turn, but not where each has fewer keys at a time.
constexpr bool TAKE_TURNS = BLOCK_N == 128;
constexpr int TURN_BARRIER = 1;  // of warpgroup 0; the other's follows
constexpr int PANEL = 64;        // columns of a panel: 128 bytes a row, the swizzle's width
constexpr int PANELS = (HEAD_DIM + PANEL - 1) / PANEL;
constexpr int DIM = (HEAD_DIM + 15) / 16 * 16;  // in whole products; zeros from HEAD_DIM on

// Columns of a tensor in panels, as TMA writes them: in each, 8 rows of 128 bytes are swizzled.
template <int ROWS>
using Tile = Element[PANELS][ROWS][PANEL];

// What a warpgroup has found in a block's keys of a work tile: O = sum P V, m and l, P = 2^(S - m).
struct alignas(128) Part {
    float o[BLOCK_M][HEAD_DIM];
    float row_max[BLOCK_M], row_sum[BLOCK_M];
};
// A block leaves at most one part of a work tile whose last keys it has, and one of its last work tile,
// which goes on in the next block.
enum PartKind { ENDS, GOES_ON };
struct Parts {
    Part part[2][CONSUMERS];
};
// A work tile whose first keys a block has, and whose last ones another.
struct Split {
    int rows;        // of the work tile; 0: the block has the beginning of none that goes on
    int last_block;  // which has its last keys
    int first_row, q_begin, batch, kv_head;
    int blocks;  // in the first block's: how many there are
};
constexpr int MAX_BLOCKS = 144;                       // no device of this architecture has more SMs
constexpr int MERGE_THREADS = 256, MERGE_BLOCKS = 4;  // the latter on an SM
constexpr int MERGE_CHUNKS = HEAD_DIM / 4;  // of a row of O: a thread merges four columns,
constexpr int MERGED_AT_ONCE = 4;           // and of so many parts at a time
constexpr int SEGMENT_STAGES = 4;
constexpr uint32_t MOST_UNITS = UINT32_MAX;  // of which shares are cut
constexpr int BLOCKS_OF_LANE = (MAX_BLOCKS + 31) / 32;

// What a block computes of a work tile: of up to BLOCK_M rows of each consumer, which share a key head,
// some tiles of keys. Row n of a key head is query n / group of head n % group of its group.
struct Segment {
    int q_begin, k_begin, k_end, batch;  // of the sequence
    int own_key;  // the last key that its first query sees with a causal mask
    int kv_head;
    int first_row, rows;  // rows: of the key head; 0 behind the last segment
    int k_start;          // of the first tile of keys that the work tile's first row sees
    int first, end;       // tiles, from k_start on
    PartKind kind;
    bool is_whole;  // all tiles of the work tile
};

struct alignas(1024) SharedMemory {  // the swizzle's pattern: 8 rows of 128 bytes
    Tile<BLOCK_M> q[Q_TILES];        // a work tile has one for each warpgroup that computes
    Tile<BLOCK_N> k[NUM_STAGES], v[NUM_STAGES];
    Mbarrier q_full[Q_TILES], k_full[NUM_STAGES], v_full[NUM_STAGES];     // the tile has arrived
    Mbarrier q_empty[Q_TILES], k_empty[NUM_STAGES], v_empty[NUM_STAGES];  // every warp has read it
    Segment segments[SEGMENT_STAGES];
    Mbarrier segment_full[SEGMENT_STAGES], segment_empty[SEGMENT_STAGES];
    int consumers;  // warpgroups that have rows
};
static_assert(sizeof(SharedMemory) <= 227 * 1024);

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_forward",
                 .grid = {{SEQ_Q, BLOCK_M}, {SEQ_K, BLOCK_N}, {HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS,
                 .smem_bytes = sizeof(SharedMemory),
                 .blocks_per_sm = 1},
                {.name = "attention_merge",
                 .grid = {{SEQ_Q, 1}, {HEADS, 1}, {BATCH, 1}},
                 .threads = MERGE_THREADS,
                 .blocks_per_sm = MERGE_BLOCKS}},
    // For each block; by an axis, as blocks without a second tile leave parts, too.
    .workspace = {{.element_bytes = sizeof(Parts), .shape = {{BATCH, MAX_BLOCKS}}},
                  {.element_bytes = sizeof(Split), .shape = {{BATCH, MAX_BLOCKS}}}},
    .k_box = {BLOCK_N, PANEL, SWIZZLE_128B},
    .v_box = {BLOCK_N, PANEL, SWIZZLE_128B},
};
__constant__ int32_t kernels_start_early = 1;
// Half a row is a panel's: the other half is fetched with it, where the two are 256 bytes.
__constant__ int32_t l2_fetch_bytes = HEAD_DIM % (2 * PANEL) == 0 ? 256 : 128;
}

// The window of a query: with a causal mask it has no key after its own.
__device__ int window_right(const LengthsParams& p) { return CAUSAL ? 0 : p.window_right; }

// The keys that a query sees: from first_visible() to before end_visible(). Its own key may be before the
// sequence's first one, and where it is no query, behind the last one. No sum here overflows.
__device__ int first_visible(const LengthsParams& p, int own_key, int k_begin) {
    return own_key - min(p.window_left, max(own_key - k_begin, 0));
}
__device__ int end_visible(const LengthsParams& p, int own_key, int k_end) {
    return own_key + 1 + min(window_right(p), k_end - 1 - own_key);
}

// How many queries a sequence has.
__device__ int queries_of(const LengthsParams& p, int sequence) {
    const int32_t* starts = p.cu_seqlens_q;
    return starts ? starts[sequence + 1] - starts[sequence] : p.seq_q;
}

// A sequence, and its work tiles: those of the first key head, then those of the next one.
struct Sequence {
    int q_begin, k_begin, k_end;
    int rows, row_tiles;  // of a key head
    uint32_t works;       // all work tiles
    uint32_t tiles;       // of keys, of each: as many as one of them may see, and at least one
};

__device__ Sequence sequence_at(const LengthsParams& p, int i, int group, int consumers) {
    const bool packed = p.cu_seqlens_q != nullptr;
    const int queries = queries_of(p, i), tile_rows = BLOCK_M * consumers;
    Sequence s = {.q_begin = packed ? p.cu_seqlens_q[i] : 0,
                  .k_begin = packed ? p.cu_seqlens_k[i] : 0,
                  .rows = queries * group};
    s.k_end = p.seqused_k ? s.k_begin + p.seqused_k[i] : packed ? p.cu_seqlens_k[i + 1] : p.seq_k;
    static_assert(CONSUMERS == 2);
    s.row_tiles = (s.rows + tile_rows - 1) / BLOCK_M >> (consumers - 1);
    s.works = uint32_t(p.kv_heads) * s.row_tiles;
    const int64_t window = int64_t(p.window_left) + window_right(p) + min(queries, tile_rows);
    s.tiles = max((int(min(window, int64_t(s.k_end - s.k_begin))) + BLOCK_N - 1) / BLOCK_N, 1);
    return s;
}

// Waits for the end of a phase. Phase -1 counts as ended: a new stage is empty.
__device__ void wait_for(Mbarrier& barrier, int phase) {
    while (!mbarrier_try_wait_parity(barrier, phase & 1)) {
    }
}

// Starts tile[panel][r][col] = tensor[row + r][PANEL panel + col], zeros from row `end` on, and
// announces its bytes to the barrier. The tensor has `rows` rows. Called by one thread.
__device__ void load_tile(Tile<BLOCK_N>& tile, const TensorMap& map, int rows, int row, int end,
                          int head, int batch, Mbarrier& full) {
    mbarrier_arrive_expect_tx(full, sizeof(tile));
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
        cp_async_bulk_tensor_5d_load(tile[panel][0], map, PANEL * panel, rows - end + row, head,
                                     batch, end, full);
}

// Describes the columns d ... d + 15 of a tile: Q or K.
template <int ROWS>
__device__ uint64_t k_major(const Tile<ROWS>& tile, int d) {
    return matrix_descriptor<SWIZZLE_128B>(&tile[d / PANEL][0][d % PANEL], 0, SWIZZLE_128B_TILE);
}

// Describes the rows key ... key + 15 of a tile, all columns: V.
template <int ROWS>
__device__ uint64_t mn_major(const Tile<ROWS>& tile, int key) {
    return matrix_descriptor<SWIZZLE_128B>(&tile[0][key][0], sizeof(tile[0]), SWIZZLE_128B_TILE);
}

// Where TMA would put 8 elements of a tile's row from column d on: 8 chunks of a row change places.
template <int ROWS>
__device__ Element* swizzled(Tile<ROWS>& tile, int row, int d) {
    return &tile[d / PANEL][row][d % PANEL ^ row % 8 * VEC];
}

// The place of a segment's Q, by the segment's number: in turn one of as many as there is room for.
struct QPlace {
    int stage, phase;
    int tile;  // the first of its tiles

    __device__ QPlace(int consumers, int number) {
        const int stages = Q_TILES / consumers;
        stage = number % stages, phase = number / stages, tile = stage * consumers;
    }
};

// ---- copy Q, whose rows are of several heads: no box of a tensor map. By Q_WARPS warps. What stays
// in rows past the last is multiplied, and nobody reads the products
__device__ void load_q(const LengthsParams& p, SharedMemory& smem) {
    constexpr int CHUNKS = DIM / VEC;  // of a row
    const int group = p.heads / p.kv_heads;
    const int thread = threadIdx.x - 32 * (PRODUCER_WARP + 1);
    for (int i = 0;; ++i) {
        wait_for(smem.segment_full[i % SEGMENT_STAGES], i / SEGMENT_STAGES);
        const Segment& segment = smem.segments[i % SEGMENT_STAGES];
        if (segment.rows == 0) break;
        const QPlace place(smem.consumers, i);
        wait_for(smem.q_empty[place.stage], place.phase - 1);
        const int rows = min(BLOCK_M * smem.consumers, segment.rows - segment.first_row);
        for (int n = thread; n < rows * CHUNKS; n += 32 * Q_WARPS) {
            const int local = n / CHUNKS, d = n % CHUNKS * VEC, row = segment.first_row + local;
            const int head = segment.kv_head * group + row % group;
            const Element* q = p.q + segment.batch * p.q_stride.batch + head * p.q_stride.head +
                               (segment.q_begin + row / group) * p.q_stride.row + d;
            const bool valid = d < HEAD_DIM;
            cp_async_cg(swizzled(smem.q[place.tile + local / BLOCK_M], local % BLOCK_M, d),
                        valid ? q : p.q, valid);
        }
        cp_async_commit_group();
        cp_async_wait_group<0>();
        fence_proxy_async();  // by each writer
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(smem.q_full[place.stage]);
    }
}

// The shares, by one warp. They are of units: of single tiles of keys or, where these are too many, of 2,
// 4 ... of a work tile's. A 64-bit division takes long; so does code that has not run before, until it
// arrives: loops are not unrolled.
struct Shares {
    int shift;  // a unit is 2^shift tiles
    uint32_t blocks;
    uint32_t share, longer;  // a share is so many units, those of the first blocks one more

    __device__ Shares(const LengthsParams& p, int group, int consumers)
        : shift(0), blocks(min(gridDim.x, MAX_BLOCKS)) {
        uint64_t units;
#pragma unroll 1
        for (;; ++shift) {
            units = 0;
#pragma unroll 1
            for (int i = threadIdx.x % 32; i < p.sequences; i += 32) {
                const Sequence sequence = sequence_at(p, i, group, consumers);
                units += uint64_t(sequence.works) * units_of(sequence.tiles);
            }
#pragma unroll
            for (int distance = 16; distance > 0; distance /= 2)
                units += __shfl_xor_sync(0xffffffff, units, distance);
            if (units <= MOST_UNITS) break;
        }
        share = uint32_t(units) / blocks;
        longer = uint32_t(units) - share * blocks;
    }

    __device__ uint32_t units_of(uint32_t tiles) const { return (tiles - 1 >> shift) + 1; }
    // Where a block's share begins, and that of the block before ends.
    __device__ uint32_t cut(uint32_t block) const { return share * block + min(block, longer); }
    // Whose share has the unit.
    __device__ uint32_t block_of(uint32_t unit) const {
        const uint32_t first = cut(longer);
        return unit < first ? unit / (share + 1) : longer + (unit - first) / share;
    }
};

// ---- the segments of the block's share, and their K and V. By one warp: lane n knows the n-th of 32
// sequences, and lane 0 starts the copies
__device__ void load_kv(const LengthsParams& p, SharedMemory& smem) {
    const int lane = threadIdx.x % 32, consumers = smem.consumers;
    const int group = p.heads / p.kv_heads, tile_rows = BLOCK_M * consumers;
    const Shares shares(p, group, consumers);
    uint32_t unit = shares.cut(min(blockIdx.x, shares.blocks));
    const uint32_t end = shares.cut(min(blockIdx.x + 1, shares.blocks));
    Split split = {.rows = 0, .blocks = int(gridDim.x)};
    Sequence own;                        // the lane's
    uint32_t own_units = 0, behind = 0;  // and the units up to its end
    int start = -32;                     // lane 0's sequence
    int i = 0, number = 0;               // numbers of the segment and of the tile
#pragma unroll 1
    while (unit < end) {
        // So many of the sequences end before the unit.
        const int ended = __popc(__ballot_sync(0xffffffff, behind <= unit));
        if (ended == 32) {  // the next 32
            start += 32;
            own = sequence_at(p, min(start + lane, p.sequences - 1), group, consumers);
            own_units = start + lane < p.sequences ? own.works * shares.units_of(own.tiles) : 0;
            const uint32_t before = __shfl_sync(0xffffffff, behind, 31);
            behind = own_units;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const uint32_t other = __shfl_up_sync(0xffffffff, behind, distance);
                if (lane >= distance) behind += other;
            }
            behind += before;
            continue;
        }
        const auto its = [&](auto x) { return __shfl_sync(0xffffffff, x, ended); };
        const uint32_t work_units = shares.units_of(its(own.tiles));
        const uint32_t inside = unit - its(behind - own_units);
        const uint32_t work = inside / work_units, first_unit = inside - work * work_units;
        const uint32_t num_units = min(work_units - first_unit, end - unit);
        const int row_tiles = its(own.row_tiles), kv_head = work / row_tiles;
        Segment segment = {.q_begin = its(own.q_begin),
                           .k_begin = its(own.k_begin),
                           .k_end = its(own.k_end),
                           .batch = p.cu_seqlens_q ? 0 : start + ended,
                           .kv_head = kv_head,
                           .first_row = int(work - kv_head * row_tiles) * tile_rows,
                           .rows = its(own.rows),
                           .first = int(first_unit << shares.shift)};
        segment.own_key = segment.k_end - segment.rows / group;
        segment.end = first_unit + num_units << shares.shift;
        segment.kind = first_unit + num_units == work_units ? ENDS : GOES_ON;
        segment.is_whole = num_units == work_units;
        // Nothing is loaded that no row sees.
        const int rows = min(tile_rows, segment.rows - segment.first_row);
        const int first_key = segment.own_key + segment.first_row / group;
        const int last_key = segment.own_key + (segment.first_row + rows - 1) / group;
        segment.k_start = max(segment.k_begin, first_visible(p, first_key, segment.k_begin));
        const int keys = max(end_visible(p, last_key, segment.k_end) - segment.k_start, 0);
        segment.end = min(segment.end, (keys + BLOCK_N - 1) / BLOCK_N);

        const int place = i % SEGMENT_STAGES;
        if (lane == 0) {
            wait_for(smem.segment_empty[place], i / SEGMENT_STAGES - 1);
            smem.segments[place] = segment;
            mbarrier_arrive(smem.segment_full[place]);
            for (int tile = segment.first; tile < segment.end; ++tile, ++number) {
                const int stage = number % NUM_STAGES, phase = number / NUM_STAGES;
                const int row = segment.k_start + tile * BLOCK_N;
                wait_for(smem.k_empty[stage], phase - 1);
                load_tile(smem.k[stage], p.k_map, p.seq_k, row, segment.k_end, kv_head,
                          segment.batch, smem.k_full[stage]);
                wait_for(smem.v_empty[stage], phase - 1);
                load_tile(smem.v[stage], p.v_map, p.seq_k, row, segment.k_end, kv_head,
                          segment.batch, smem.v_full[stage]);
            }
        }
        __syncwarp();
        if (segment.kind == GOES_ON && segment.first == 0)
            split = {.rows = rows,
                     .last_block = int(shares.block_of(unit + work_units - 1)),
                     .first_row = segment.first_row,
                     .q_begin = segment.q_begin,
                     .batch = segment.batch,
                     .kv_head = kv_head,
                     .blocks = split.blocks};
        unit += num_units, ++i;
    }
    if (lane > 0) return;
    const int place = i % SEGMENT_STAGES;
    wait_for(smem.segment_empty[place], i / SEGMENT_STAGES - 1);
    smem.segments[place].rows = 0;
    mbarrier_arrive(smem.segment_full[place]);
    if (blockIdx.x < MAX_BLOCKS) static_cast<Split*>(p.workspace[1])[blockIdx.x] = split;
}

// ---- what a consumer computes: its rows of all segments
__device__ void compute(const LengthsParams& p, SharedMemory& smem) {
    const int group = p.heads / p.kv_heads;
    const auto uniform = [](int x) { return __shfl_sync(0xffffffff, x, 0); };
    const int lane = threadIdx.x % 32;
    const int warp = uniform(threadIdx.x / 32), warpgroup = warp / 4;
    const int warp_row = warp % 4 * 16;
    Parts* const parts = static_cast<Parts*>(p.workspace[0]);
    const auto release = [&](Mbarrier& empty) {
        if (lane == 0) mbarrier_arrive(empty);
    };
    const float scale_log2 = p.softmax_scale * LOG2_E;  // exp(scale s) = 2^(scale_log2 s)
    // A lane's s_acc[n][2 r + i] and o_acc[n][2 r + i], with r and i 0 or 1, are the elements of S
    // and O in row 8 r + lane / 4 of its warp's 16 and column 8 n + 2 (lane % 4) + i.
    float s_acc[BLOCK_N / 8][4];
    uint32_t p_frag[BLOCK_N / 16][4];
    float row_max[2];  // m, in units of log2
    float row_sum[2];  // this lane's share of l
    float rescale[2];
    // Ping-pong scheduling, as in v09.
    const bool take_turns = TAKE_TURNS && smem.consumers == CONSUMERS;
    const auto wait_for_turn = [&] {
        if (take_turns) bar_sync(TURN_BARRIER + warpgroup, 128 * CONSUMERS);
    };
    const auto pass_turn = [&] {
        if (take_turns) bar_arrive(TURN_BARRIER + 1 - warpgroup, 128 * CONSUMERS);
    };
    if (warpgroup == 1) pass_turn();  // the first turn is warpgroup 0's

    int number = 0;  // of the next tile among the block's
    for (int i = 0;; ++i) {
        wait_for(smem.segment_full[i % SEGMENT_STAGES], i / SEGMENT_STAGES);
        const Segment& segment = smem.segments[i % SEGMENT_STAGES];
        if (segment.rows == 0) break;
        const QPlace place(smem.consumers, i);
        wait_for(smem.q_full[place.stage], place.phase);
        __syncwarp();  // a lane still waiting would miss the phases that the release allows
        const Tile<BLOCK_M>& q = smem.q[place.tile + warpgroup];
        const int first_row = segment.first_row + BLOCK_M * warpgroup + warp_row;
        const auto own_key = [&](int row) { return segment.own_key + row / group; };
        // All of the warp's rows see the keys from clear_begin to before clear_end.
        const int clear_begin = first_visible(p, own_key(first_row + 15), segment.k_begin);
        const int clear_end = end_visible(p, own_key(first_row), segment.k_end);

        // ---- S = Q K^T  [BLOCK_M, BLOCK_N]
        const auto start_s = [&](int number) {
            const int stage = number % NUM_STAGES;
            wait_for(smem.k_full[stage], number / NUM_STAGES);
            wgmma_fence(s_acc);
#pragma unroll
            for (int d = 0; d < HEAD_DIM; d += 16)
                wgmma_m64nNk16<Element, K_MAJOR, K_MAJOR>(
                    s_acc, k_major<BLOCK_M>(q, d), k_major<BLOCK_N>(smem.k[stage], d), d > 0);
            wgmma_commit_group();
        };
        float o_acc[DIM / 8][4] = {};
        // ---- O += P V  [BLOCK_M, HEAD_DIM]
        const auto start_pv = [&](int number) {
            const int stage = number % NUM_STAGES;
            wait_for(smem.v_full[stage], number / NUM_STAGES);
            wgmma_fence(o_acc, p_frag);
#pragma unroll
            for (int j = 0; j < BLOCK_N; j += 16)
                wgmma_m64nNk16<Element, MN_MAJOR>(o_acc, p_frag[j / 16],
                                                  mn_major<BLOCK_N>(smem.v[stage], j), true);
            wgmma_commit_group();
        };
        // ---- online softmax: P = 2^(S - m)
        const auto softmax = [&](int tile) {
            float tile_scale = scale_log2;
            // Without this the largest S would not be the largest logit, and 0 * -inf is NaN.
            if (scale_log2 <= 0.0f) {
                tile_scale = 1.0f;
#pragma unroll
                for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) s_acc[n][i] *= scale_log2;
            }
            const int k_start = segment.k_start + tile * BLOCK_N;
            if (k_start < clear_begin || k_start + BLOCK_N > clear_end) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    // From the lane's first column on.
                    const int own = own_key(first_row + 8 * r + lane / 4);
                    const int column = k_start + 2 * (lane % 4);
                    const int first = first_visible(p, own, segment.k_begin) - column;
                    const int end = end_visible(p, own, segment.k_end) - column;
#pragma unroll
                    for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
                        for (int i = 0; i < 2; ++i)
                            if (8 * n + i < first || 8 * n + i >= end)
                                s_acc[n][2 * r + i] = -INFINITY;
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float x = -INFINITY;
#pragma unroll
                for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) x = fmaxf(x, s_acc[n][2 * r + i]);
                const float row_max_new = fmaxf(row_max[r], quad_max(x) * tile_scale);
                // Where no key is visible yet all S are -inf, and -inf + inf is NaN.
                const float shift = row_max_new == -INFINITY ? 0.0f : row_max_new;
                rescale[r] = ex2_approx_ftz(row_max[r] - shift);
                row_max[r] = row_max_new;
                float sum = 0.0f;
#pragma unroll
                for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float& s = s_acc[n][2 * r + i];
                        s = ex2_approx_ftz(s * tile_scale - shift);
                        sum += s;
                    }
                row_sum[r] = row_sum[r] * rescale[r] + sum;
            }
        };
        const auto convert_p = [&] {
#pragma unroll
            for (int j = 0; j < BLOCK_N / 16; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* s = &s_acc[2 * j + i / 2][2 * (i % 2)];
                    p_frag[j][i] = cvt_rn_x2<Element>(s[0], s[1]);
                }
        };

        row_max[0] = row_max[1] = -INFINITY;
        row_sum[0] = row_sum[1] = 0.0f;
        const int end = segment.end;
        // ---- for each K/V tile
        if (segment.first < end) {
            wait_for_turn();
            start_s(number);
            pass_turn();
            wgmma_wait_group<0>(s_acc);
            release(smem.k_empty[number % NUM_STAGES]);
            softmax(segment.first);
            convert_p();
            for (int tile = segment.first + 1; tile < end; ++tile, ++number) {
                wait_for_turn();
                start_s(number + 1);
                start_pv(number);
                pass_turn();
                wgmma_wait_group<1>(s_acc);
                release(smem.k_empty[(number + 1) % NUM_STAGES]);
                softmax(tile);  // while O += P V runs
                wgmma_wait_group<0>(o_acc, p_frag);
                release(smem.v_empty[number % NUM_STAGES]);
#pragma unroll
                for (int n = 0; n < DIM / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) o_acc[n][i] *= rescale[i / 2];
                convert_p();
            }
            wait_for_turn();
            start_pv(number);
            pass_turn();
            wgmma_wait_group<0>(o_acc, p_frag);
            release(smem.v_empty[number % NUM_STAGES]);
            ++number;
        }
        release(smem.q_empty[place.stage]);

        // ---- write O and lse, or a part of them
        Part& part = parts[blockIdx.x].part[segment.kind][warpgroup];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            row_sum[r] = quad_sum(row_sum[r]);
            const int local = warp_row + 8 * r + lane / 4, row = first_row + 8 * r + lane / 4;
            if (first_row + 8 * r >= segment.rows) continue;  // for the whole warp
            const bool is_there = row < segment.rows;
            if (segment.is_whole) {
                const int query = segment.q_begin + row / group;
                const int head = segment.kv_head * group + row % group;
                const float inverse = row_sum[r] == 0.0f ? 0.0f : 1.0f / row_sum[r];
                Element* o = p.o + segment.batch * p.o_stride.batch + head * p.o_stride.head +
                             query * p.o_stride.row;
                // As in v13: four lanes write 32 bytes of a row, at once.
                const int odd = lane % 2;
#pragma unroll
                for (int n = 0; n < DIM / 8; n += 2) {
                    uint32_t pair[2];
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        pair[i] = cvt_rn_x2<Element>(o_acc[n + i][2 * r] * inverse,
                                                     o_acc[n + i][2 * r + 1] * inverse);
                    const uint32_t theirs = __shfl_xor_sync(0xffffffff, odd ? pair[0] : pair[1], 1);
                    const uint32_t low = odd ? theirs : pair[0], high = odd ? pair[1] : theirs;
                    const int d = 8 * (n + odd) + lane % 4 / 2 * 4;
                    if (is_there && d < HEAD_DIM)
                        *reinterpret_cast<uint64_t*>(o + d) = uint64_t(high) << 32 | low;
                }
                if (is_there && lane % 4 == 0)
                    p.lse[(int64_t(segment.batch) * p.heads + head) * p.seq_q + query] =
                        row_sum[r] == 0.0f ? -INFINITY
                                           : (row_max[r] + lg2_approx_ftz(row_sum[r])) * LN_2;
            } else if (is_there) {
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 8; ++n)
                    *reinterpret_cast<float2*>(&part.o[local][8 * n + 2 * (lane % 4)]) =
                        float2{o_acc[n][2 * r], o_acc[n][2 * r + 1]};
                if (lane % 4 == 0)
                    part.row_max[local] = row_max[r], part.row_sum[local] = row_sum[r];
            }
        }
        __syncwarp();  // every lane has read what the segment is
        release(smem.segment_empty[i % SEGMENT_STAGES]);
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_forward(const __grid_constant__ LengthsParams p) {
    SharedMemory& smem = shared_memory<SharedMemory>();
    const int warp = __shfl_sync(0xffffffff, int(threadIdx.x) / 32, 0);
    griddepcontrol_launch_dependents();  // attention_merge may take the SMs that become free

    if (warp == PRODUCER_WARP) {
        const int group = p.heads / p.kv_heads;
        bool many = false;  // rows, in a sequence
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < (p.cu_seqlens_q ? p.sequences : 1); i += 32)
            many |= queries_of(p, i) * group > BLOCK_M;
        const int consumers = __any_sync(0xffffffff, many) ? CONSUMERS : 1;
        if (threadIdx.x % 32 == 0) {
            smem.consumers = consumers;
#pragma unroll
            for (int stage = 0; stage < Q_TILES; ++stage) {
                mbarrier_init(smem.q_full[stage], Q_WARPS);
                mbarrier_init(smem.q_empty[stage], 4 * consumers);
            }
#pragma unroll
            for (int stage = 0; stage < NUM_STAGES; ++stage) {
                mbarrier_init(smem.k_full[stage], 1);
                mbarrier_init(smem.v_full[stage], 1);
                mbarrier_init(smem.k_empty[stage], 4 * consumers);
                mbarrier_init(smem.v_empty[stage], 4 * consumers);
            }
#pragma unroll
            for (int stage = 0; stage < SEGMENT_STAGES; ++stage) {
                mbarrier_init(smem.segment_full[stage], 1);
                mbarrier_init(smem.segment_empty[stage], 4 * consumers);
            }
            fence_mbarrier_init();
        }
    } else if (threadIdx.x == 32 * (PRODUCER_WARP + 1)) {
        prefetch_tensormap(p.k_map);
        prefetch_tensormap(p.v_map);
    }
    __syncthreads();  // the mbarriers are initialized

    if (warp >= PRODUCER_WARP) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp > PRODUCER_WARP)
            load_q(p, smem);
        else
            load_kv(p, smem);
        return;
    }
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    if (warp < 4 * smem.consumers) compute(p, smem);
}

// ---- O = sum of the parts' O, each times 2^(m of the part - m), over l; and lse. A thread has four
// columns of a row, and of its parts every `lanes`-th: so many lanes of a warp have the same columns.
__device__ void merge(const LengthsParams& p, const Split& split, int first_block, int local_row,
                      int d, int lanes, bool is_there) {
    const Parts* parts = static_cast<const Parts*>(p.workspace[0]);
    const int local = local_row % BLOCK_M, warpgroup = local_row / BLOCK_M;
    const int lane = threadIdx.x % lanes;
    float row_max = -INFINITY, row_sum = 0.0f, o[4] = {};
    for (int block = first_block + lane; is_there && block <= split.last_block;
         block += MERGED_AT_ONCE * lanes) {
        // All loads first: they take as long as one.
        float part_max[MERGED_AT_ONCE], part_sum[MERGED_AT_ONCE];
        float4 part_o[MERGED_AT_ONCE];
#pragma unroll
        for (int n = 0; n < MERGED_AT_ONCE; ++n) {
            const int of = block + n * lanes;
            part_max[n] = -INFINITY, part_sum[n] = 0.0f, part_o[n] = make_float4(0, 0, 0, 0);
            if (of > split.last_block) continue;
            const Part& part = parts[of].part[of < split.last_block ? GOES_ON : ENDS][warpgroup];
            part_max[n] = part.row_max[local], part_sum[n] = part.row_sum[local];
            part_o[n] = load_float4(&part.o[local][d]);
        }
        float new_max = row_max;
#pragma unroll
        for (float m : part_max) new_max = fmaxf(new_max, m);
        const float shift = new_max == -INFINITY ? 0.0f : new_max;  // -inf - -inf is NaN
        const float rescale = ex2_approx_ftz(row_max - shift);
        row_sum *= rescale;
#pragma unroll
        for (float& x : o) x *= rescale;
#pragma unroll
        for (int n = 0; n < MERGED_AT_ONCE; ++n) {
            const float factor = ex2_approx_ftz(part_max[n] - shift);
            row_sum += factor * part_sum[n];
            o[0] += factor * part_o[n].x, o[1] += factor * part_o[n].y;
            o[2] += factor * part_o[n].z, o[3] += factor * part_o[n].w;
        }
        row_max = new_max;
    }
    // The same once more, of what the lanes have.
    const float lane_max = row_max;
    for (int other = 1; other < lanes; other *= 2)
        row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffff, row_max, other));
    const float rescale = ex2_approx_ftz(lane_max - (row_max == -INFINITY ? 0.0f : row_max));
    row_sum *= rescale;
#pragma unroll
    for (float& x : o) x *= rescale;
    for (int other = 1; other < lanes; other *= 2) {
        row_sum += __shfl_xor_sync(0xffffffff, row_sum, other);
#pragma unroll
        for (float& x : o) x += __shfl_xor_sync(0xffffffff, x, other);
    }
    if (!is_there || lane > 0) return;
    const float inverse = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
    const int group = p.heads / p.kv_heads, row = split.first_row + local_row;
    const int query = split.q_begin + row / group, head = split.kv_head * group + row % group;
    Element* out =
        p.o + split.batch * p.o_stride.batch + head * p.o_stride.head + query * p.o_stride.row;
    store_float4(out + d,
                 make_float4(o[0] * inverse, o[1] * inverse, o[2] * inverse, o[3] * inverse));
    if (d == 0)
        p.lse[(int64_t(split.batch) * p.heads + head) * p.seq_q + query] =
            row_sum == 0.0f ? -INFINITY : (row_max + lg2_approx_ftz(row_sum)) * LN_2;
}

// Every block merges some rows of a work tile that is split, and as many blocks those of the next one.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS, MERGE_BLOCKS)
    attention_merge(const __grid_constant__ LengthsParams p) {
    griddepcontrol_wait();  // the parts are there
    const Split* splits = static_cast<const Split*>(p.workspace[1]);
    const int lane = threadIdx.x % 32, blocks = min(splits[0].blocks, MAX_BLOCKS);
    // The n-th of the blocks that have the beginning of a split work tile, and how many these are.
    bool begins[BLOCKS_OF_LANE];
    int n_of[BLOCKS_OF_LANE], count = 0;
#pragma unroll
    for (int i = 0; i < BLOCKS_OF_LANE; ++i) {
        const int block = 32 * i + lane;
        begins[i] = block < blocks && splits[block].rows > 0;
        const uint32_t all = __ballot_sync(0xffffffff, begins[i]);
        n_of[i] = count + __popc(all & ((1u << lane) - 1));
        count += __popc(all);
    }
    if (count == 0) return;
    const int blocks_each = max(int(gridDim.x) / count, 1);
    for (int n = blockIdx.x / blocks_each; n < count; n += gridDim.x / blocks_each) {
        int first_block = 0;
#pragma unroll
        for (int i = 0; i < BLOCKS_OF_LANE; ++i) {
            const uint32_t it = __ballot_sync(0xffffffff, begins[i] && n_of[i] == n);
            if (it) first_block = 32 * i + __popc(it - 1);
        }
        const Split split = splits[first_block];
        const int chunks = split.rows * MERGE_CHUNKS, threads = blocks_each * MERGE_THREADS;
        // So many lanes that each loads all of its parts at once, unless there are not so many threads.
        const int parts = split.last_block - first_block + 1;
        int lanes = 1;
        while (lanes < 32 && MERGED_AT_ONCE * lanes < parts && 2 * lanes * chunks <= threads)
            lanes *= 2;
        // Few rows are on all of its SMs.
        for (int warp = threadIdx.x / 32 * blocks_each + blockIdx.x % blocks_each;
             32 * warp < chunks * lanes; warp += threads / 32) {
            const int chunk = (32 * warp + lane) / lanes;
            merge(p, split, first_block, min(chunk / MERGE_CHUNKS, split.rows - 1),
                  chunk % MERGE_CHUNKS * 4, lanes, chunk < chunks);
        }
    }
}
