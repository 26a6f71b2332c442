// b11 -- lengths and windows, backward: the gradients of v14
// taken: only for lengths and windows; b10 has none to look up
// change: of b08, the mask and the schedule, as in v14. The first kernel lists the works of all
//     sequences, too, the longest first. The tiles of queries of a sequence, of which dQ is summed, have
//     places of their own, and so has a sequence without queries. Rows that no query sees get zeros
// why: as v14. Predicted: the TFLOP/s of b08 of what is visible, less the parts of tiles at the ends of
//     sequences and windows
// limits: bf16, fp16; head_dim 8-128 by 8; sm_90a
//     needs 4 bytes of workspace for each element of dQ
// repeats: all bits but dq's; blocks add to it in any order
#include "backward_lengths.cuh"
#include "bulk.cuh"
#include "dependent_launch.cuh"
#include "mma.cuh"
#include "ragged.cuh"
#include "ticket.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

constexpr int CONSUMERS = 2;  // warpgroups that compute; one more loads and adds dQ to its sum
constexpr int NUM_THREADS = 128 * (CONSUMERS + 1);
constexpr int PRODUCER_WARP = 4 * CONSUMERS;  // starts all loads; the next ones add dQ
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
constexpr int BLOCK_N = 64 * CONSUMERS;             // keys; a warpgroup computes for 64
constexpr int BLOCK_M = HEAD_DIM <= 64 ? 128 : 64;  // queries of a tile
// Tiles in shared memory. Q is read longest, by S first and by dK last; a third tile, where there is
// room, arrives before a warpgroup can ask for it. dS is read a tile late.
constexpr int Q_STAGES = HEAD_DIM <= 64 ? 2 : 3;
constexpr int DOUT_STAGES = 2;
constexpr int DS_STAGES = 3;
constexpr int PANEL = 64;  // columns of a panel: 128 bytes, the swizzle's width
constexpr int PANELS = (HEAD_DIM + PANEL - 1) / PANEL;
constexpr int DIM = (HEAD_DIM + 15) / 16 * 16;  // in whole products; zeros from HEAD_DIM on

// Of dQ each warpgroup has 64 rows: of 128 queries half; of 64 queries all, and a panel of columns.
constexpr bool DQ_BY_ROWS = BLOCK_M > 64;
static_assert(DQ_BY_ROWS ? PANELS == 1 : PANELS == CONSUMERS);
__device__ constexpr int dq_columns(int warpgroup) {
    return DQ_BY_ROWS ? DIM : warpgroup == 0 ? PANEL : DIM - PANEL;
}

// Named barriers; 0 is that of __syncthreads. Those of dQ are warpgroup 0's; the others' follow.
constexpr int CONSUMERS_BARRIER = 1;
constexpr int DQ_FULL_BARRIER = 2;
constexpr int DQ_EMPTY_BARRIER = DQ_FULL_BARRIER + CONSUMERS;
constexpr int TURN_BARRIER = DQ_EMPTY_BARRIER + CONSUMERS;

// A tile as TMA writes it: panels, in each of which 8 rows of 128 bytes are swizzled.
template <int ROWS>
using Tile = Element[PANELS][ROWS][PANEL];

// Of dQ's accumulators, for each 8 columns of a warpgroup's part: four floats of each thread. So lies a
// tile of dQ until it is rounded, the second warpgroup's part behind the first one's.
using DqColumns = float[128][4];
using DqTile = DqColumns[(dq_columns(0) + dq_columns(1)) / 8];
__device__ DqColumns* dq_part(DqTile& tile, int warpgroup) {
    return &tile[warpgroup * dq_columns(0) / 8];
}

// Of a tile's queries: lse in units of log2, and delta.
struct Rows {
    float lse[BLOCK_M], delta[BLOCK_M];
};

// A sequence's rows, from the tensors' first ones on. Of the keys those before k_used are there; the
// others have gradients of 0.
struct Sequence {
    int q_begin, q_end, k_begin, k_used, k_end, batch;
    // Of the first tile of its queries among those of a head, Rows and DqTile. It is larger by at least
    // 1 than that of the sequence before, so there is one also where there are no queries.
    int place;

    __device__ Sequence(const BackwardLengthsParams& p, int i) {
        const bool packed = p.cu_seqlens_q != nullptr;
        batch = packed ? 0 : i;
        q_begin = packed ? p.cu_seqlens_q[i] : 0;
        q_end = packed ? p.cu_seqlens_q[i + 1] : p.seq_q;
        k_begin = packed ? p.cu_seqlens_k[i] : 0;
        k_end = packed ? p.cu_seqlens_k[i + 1] : p.seq_k;
        k_used = p.seqused_k ? k_begin + p.seqused_k[i] : k_end;
        place = place_of(p, i);
    }
    __device__ static int place_of(const BackwardLengthsParams& p, int i) {
        return int((p.cu_seqlens_q ? p.cu_seqlens_q[i] : int64_t(i) * p.seq_q) / BLOCK_M) + i;
    }

    __device__ int q_tiles() const { return max(1, (q_end - q_begin + BLOCK_M - 1) / BLOCK_M); }
    __device__ int k_blocks() const { return (k_end - k_begin + BLOCK_N - 1) / BLOCK_N; }
};

// The places of the tiles of a head's queries.
__device__ int num_places(const BackwardLengthsParams& p) {
    const int64_t rows = int64_t(p.batch) * p.seq_q + int64_t(MOST_TILE_ROWS) * p.sequences;
    return int((rows + BLOCK_M - 1) / BLOCK_M);
}

// The window of a query: with a causal mask it has no key after its own.
__device__ int window_right(const BackwardLengthsParams& p) { return CAUSAL ? 0 : p.window_right; }

// What a block works on at a time: BLOCK_N keys, and the tiles of queries that see them, of each query
// head of the keys' group; at least one, which then sees none. Tiles count from the sequence's first
// query, rows from the tensors' first ones.
struct Work {
    int first_key, k_used, k_end, kv_head, batch;
    int q_begin, q_end;
    int own_key;  // the last one that row 0 of q would see with a causal mask, if it were the sequence's
    int place, q_tiles;
    int first_head, group;
    int first_tile, end_tile;
    int num_tiles;               // of all heads; none: the block has no more works
    int start_tile, start_head;  // where the walk through the tiles begins
    bool head_by_head;
};

// A walk through a work's tiles, downward and once around: behind the first tile is the last. Either of
// each tile all heads, or of each head all tiles.
struct Walk {
    int tile, head;

    __device__ explicit Walk(const Work& work) : tile(work.start_tile), head(work.start_head) {}

    __device__ void next(const Work& work) {
        ++head;
        if (!work.head_by_head && head < work.first_head + work.group) return;
        if (--tile < work.first_tile) tile = work.end_tile - 1;
        if (!work.head_by_head)
            head = work.first_head;
        else if (tile != work.start_tile)
            --head;
    }
};

// Of Rows, and of DqTile.
__device__ int64_t tile_index(const BackwardLengthsParams& p, const Work& work, int head,
                              int tile) {
    return int64_t(head) * num_places(p) + work.place + tile;
}

// The transpose of dS.
using DsTile = Element[BLOCK_M / PANEL][BLOCK_N][PANEL];

struct alignas(SWIZZLE_128B_TILE) SharedMemory {
    Tile<BLOCK_N> k, v;
    Tile<BLOCK_M> q[Q_STAGES];
    Tile<BLOCK_M> dout[DOUT_STAGES];
    DsTile ds[DS_STAGES];                     // in the end dV
    DqColumns staging[CONSUMERS][PANEL / 8];  // dQ, on its way to its sum; in the end dK
    Rows rows[Q_STAGES];                      // arrive with Q
    int own_key[Q_STAGES];                    // of the tile's first query
    Mbarrier k_full, v_full, q_full[Q_STAGES], dout_full[DOUT_STAGES];      // the tile has arrived
    Mbarrier k_empty, v_empty, q_empty[Q_STAGES], dout_empty[DOUT_STAGES];  // all have read it
    Mbarrier ds_full[DS_STAGES];                                            // all of dS is there
    Work works[2];  // this one, and the next
    Mbarrier work_full[2], work_empty[2];
};
static_assert(sizeof(SharedMemory) <= 227 * 1024);

// Works of a head, by classes of about the same length.
struct Listed {
    int sequence, k_block;
};
constexpr int CLASSES = 32;

constexpr int ROW_THREADS = 128 * CONSUMERS;  // of attention_delta and attention_round
constexpr int LANES = 16;                     // threads that share a row of attention_delta
struct DeltaMemory {
    float largest[ROW_THREADS / 32];
    int count[CLASSES];
};

template <typename T>
constexpr bool IS_FP16 = false;
template <>
constexpr bool IS_FP16<fp16> = true;

extern "C" {
__constant__ int32_t kernels_start_early = 1;
__constant__ BackwardDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_delta",
                 .grid = {{PADDED_Q, BLOCK_M}, {HEADS, 1}},
                 .threads = ROW_THREADS,
                 .smem_bytes = sizeof(DeltaMemory)},
                {.name = "attention_backward",
                 .grid = {{SEQ_K, 1}, {KV_HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS,
                 .smem_bytes = sizeof(SharedMemory),
                 .blocks_per_sm = 1},
                {.name = "attention_round",
                 .grid = {{PADDED_Q, BLOCK_M}, {HEADS, 1}},
                 .threads = ROW_THREADS,
                 .smem_bytes = sizeof(Tile<BLOCK_M>)}},
    .workspace = {{.element_bytes = sizeof(Rows) / BLOCK_M + (IS_FP16<Element> ? sizeof(float) : 0),
                   .shape = {{HEADS, 1}, {PADDED_Q, BLOCK_M}}},
                  {.element_bytes = sizeof(DqTile) / BLOCK_M,
                   .shape = {{HEADS, 1}, {PADDED_Q, BLOCK_M}}},
                  {.element_bytes = 2 * sizeof(Listed), .shape = {{SEQ_K, 1}, {BATCH, 1}}}},
    .q_box = {BLOCK_M, PANEL, SWIZZLE_128B},
    .k_box = {BLOCK_N, PANEL, SWIZZLE_128B},
    .v_box = {BLOCK_N, PANEL, SWIZZLE_128B},
    .dout_box = {BLOCK_M, PANEL, SWIZZLE_128B},
    .dq_box = {BLOCK_M, PANEL, SWIZZLE_128B},
    .dk_box = {16, PANEL, SWIZZLE_128B},
    .dv_box = {16, PANEL, SWIZZLE_128B},
};
}

alignas(16) __device__ uint16_t zeros[BLOCK_N][PANEL];  // as many rows as the largest tile has

// Starts tile[panel][r][col] = tensor[row + r][PANEL panel + col], zeros from row `end` on. The tensor
// has `rows` rows. Called by one thread.
template <int ROWS>
__device__ void load_tile(Tile<ROWS>& tile, const TensorMap& map, int rows, int row, int end,
                          int head, int batch, Mbarrier& full) {
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
        if (row < end)
            cp_async_bulk_tensor_5d_load(tile[panel][0], map, PANEL * panel, rows - end + row, head,
                                         batch, end, full);
        else  // no box may begin behind the end
            cp_async_bulk_load(tile[panel], zeros, sizeof(tile[panel]), full);
    }
}

// Describes what lies so many elements further on: the lowest bits are the address, in units of 16
// bytes. That is one addition; from the address each takes three instructions, one after the other.
__device__ uint64_t advance(uint64_t descriptor, int elements) {
    return descriptor >> 32 << 32 | uint32_t(descriptor) + elements / VEC;
}

// Describes the columns d ... d + 15 of a tile, its rows from `row` on.
template <int ROWS>
__device__ uint64_t k_major(const Tile<ROWS>& tile, int row, int d) {
    return advance(matrix_descriptor<SWIZZLE_128B>(tile[0][row], 0, SWIZZLE_128B_TILE),
                   d / PANEL * ROWS * PANEL + d % PANEL);
}

// Describes the rows row ... row + 15 of panels, their columns from d on.
template <int N, int ROWS>
__device__ uint64_t mn_major(const Element (&panels)[N][ROWS][PANEL], int row, int d) {
    return advance(
        matrix_descriptor<SWIZZLE_128B>(panels[0][0], sizeof(panels[0]), SWIZZLE_128B_TILE),
        (d / PANEL * ROWS + row) * PANEL + d % PANEL);
}

// Where TMA puts a row's 8 elements from column d on: the 8 chunks of a row are permuted.
template <int N, int ROWS>
__device__ Element* swizzled(Element (&panels)[N][ROWS][PANEL], int row, int d) {
    return &panels[d / PANEL][row][d % PANEL ^ row % 8 * VEC];
}

// frag = acc, rounded, in the layout of wgmma's operand A
template <int STEPS>
__device__ void convert(uint32_t (&frag)[STEPS][4], const float (&acc)[2 * STEPS][4]) {
#pragma unroll
    for (int j = 0; j < STEPS; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* x = &acc[2 * j + i / 2][2 * (i % 2)];
            frag[j][i] = cvt_rn_x2<Element>(x[0], x[1]);
        }
}

// panels[row + r][column + c] = frag[r][c], of a warp's 16 rows
template <int N, int ROWS, int STEPS>
__device__ void store_rows(Element (&panels)[N][ROWS][PANEL], int row, int column,
                           const uint32_t (&frag)[STEPS][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < STEPS; ++j)
        stmatrix_x4(swizzled(panels, row + lane % 16, column + 16 * j + lane / 16 * 8), frag[j]);
}

// tensor[first_row + r] = factor acc[r], rounded, of a warp's 16 rows, which take the place of rows
// of the tile. TMA leaves out what lies past the columns, and from row `end` on, of the tensor's `rows`.
template <int TILES, int ROWS>
__device__ void write(const TensorMap& map, int rows, int first_row, int end, int head, int batch,
                      Tile<ROWS>& tile, int row, float (&acc)[TILES][4], float factor) {
    uint32_t frag[TILES / 2][4];
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] *= factor;
    convert(frag, acc);
    store_rows(tile, row, 0, frag);
    fence_proxy_async();  // by each writer, before the barrier
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel)
            cp_async_bulk_tensor_5d_store(map, PANEL * panel, rows - end + first_row, head, batch,
                                          end, tile[panel][row]);
        cp_async_bulk_commit_group();
    }
}

// Starts acc = A B^T  [64, BLOCK_M], with the 64 rows of A from `row` on.
__device__ void multiply(float (&acc)[BLOCK_M / 8][4], const Tile<BLOCK_N>& a, int row,
                         const Tile<BLOCK_M>& b) {
    wgmma_fence(acc);
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += 16)
        wgmma_m64nNk16<Element, K_MAJOR, K_MAJOR>(acc, k_major<BLOCK_N>(a, row, d),
                                                  k_major<BLOCK_M>(b, 0, d), d > 0);
    wgmma_commit_group();
}

// Starts acc += A B  [64, DIM], with A [64, BLOCK_M] in registers.
__device__ void multiply_add(float (&acc)[DIM / 8][4], uint32_t (&a)[BLOCK_M / 16][4],
                             const Tile<BLOCK_M>& b) {
    wgmma_fence(acc, a);
#pragma unroll
    for (int j = 0; j < BLOCK_M; j += 16)
        wgmma_m64nNk16<Element, MN_MAJOR>(acc, a[j / 16], mn_major(b, j, 0), true);
    wgmma_commit_group();
}

// Starts dq_acc = dS K, the warpgroup's part  [64, 8 TILES]
template <int TILES>
__device__ void multiply_dq(float (&dq_acc)[TILES][4], const DsTile& ds, const Tile<BLOCK_N>& k,
                            int warpgroup) {
    const int row = DQ_BY_ROWS ? 64 * warpgroup : 0, column = DQ_BY_ROWS ? 0 : PANEL * warpgroup;
    wgmma_fence(dq_acc);
#pragma unroll
    for (int j = 0; j < BLOCK_N; j += 16)
        wgmma_m64nNk16<Element, MN_MAJOR, MN_MAJOR>(dq_acc, mn_major(ds, j, row),
                                                    mn_major(k, j, column), j > 0);
    wgmma_commit_group();
}

// Workspace 2: how many works a head has, how many of all heads' blocks have taken after their first
// ones; and the list.
struct WorkList {
    int count, taken;
    Listed works[1];
};
__device__ WorkList& work_list(const BackwardLengthsParams& p) {
    return *static_cast<WorkList*>(p.workspace[2]);
}
// Workspace 0 behind Rows: in fp16, of each tile of queries the largest |dO|.
__device__ float* largest_of_tiles(const BackwardLengthsParams& p) {
    Rows* rows = static_cast<Rows*>(p.workspace[0]);
    return reinterpret_cast<float*>(rows + int64_t(p.heads) * num_places(p));
}

// The maximum of x over the warp, known to all its lanes.
__device__ float warp_max(float x) {
    for (int offset = 16; offset > 0; offset /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, offset));
    return x;
}

// What dS of a sequence and a key head is multiplied by before it is rounded to an operand, a power of
// two. In fp16 dS may be beyond the largest number, or below the smallest, where the gradients are not:
// 1 / factor is 16 to 32 times the largest |dO|. dQ of its query heads is summed with it, and dK.
__device__ float factor_of(const BackwardLengthsParams& p, int place, int q_tiles, int kv_head) {
    if (!IS_FP16<Element>) return 1.0f;
    const int group = p.heads / p.kv_heads;
    float largest = 0.0f;
    for (int n = threadIdx.x % 32; n < group * q_tiles; n += 32) {
        const int head = kv_head * group + n / q_tiles;
        const int64_t index = int64_t(head) * num_places(p) + place + n % q_tiles;
        largest = fmaxf(largest, largest_of_tiles(p)[index]);
    }
    int exponent;
    frexpf(warp_max(largest), &exponent);
    return ldexpf(1.0f, -exponent - 4);
}

// By all lanes of a warp: the sequence that has this place of a tile, or a later one before the next
// sequence's.
__device__ int sequence_of(const BackwardLengthsParams& p, int place) {
    int first = 0, count = p.sequences;  // it is one of these
    while (count > 1) {
        const int step = (count + 31) / 32, n = threadIdx.x % 32 * step;
        const bool begun = n < count && Sequence::place_of(p, first + n) <= place;
        const int last = __popc(__ballot_sync(0xffffffff, begun)) - 1;
        first += last * step;
        count = min(step, count - last * step);
    }
    return first;
}

// ---- the list of a head's works, the longest first, by all warps of a block
__device__ void list_works(const BackwardLengthsParams& p, int (&counts)[CLASSES]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = ROW_THREADS / 32;
    // The works with at least so many tiles of queries are the sequence's first ones, if the end of a
    // window, which the last ones do not have, counts for all.
    const auto longest = [&](const Sequence& sequence, int tiles) {
        const int64_t queries = int64_t(tiles - 1) * BLOCK_M + 1, right = window_right(p);
        const int seq_q = sequence.q_end - sequence.q_begin;
        const int offset = sequence.k_used - sequence.k_begin - seq_q;
        if (tiles <= 1) return sequence.k_blocks();
        if (queries > min(int64_t(seq_q), p.window_left + right + BLOCK_N)) return 0;
        const int64_t keys = seq_q - queries + offset + right;  // before the last block's first key
        return int(min(keys < 0 ? int64_t(0) : keys / BLOCK_N + 1, int64_t(sequence.k_blocks())));
    };
    const auto least_tiles = [](int number) { return (2 + number % 2) << number / 2 >> 1; };
    struct Blocks {
        int begin, end;
    };
    const auto blocks_of = [&](const Sequence& sequence, int number) {
        const int begin = number == CLASSES - 1 ? 0 : longest(sequence, least_tiles(number + 1));
        return Blocks{begin, max(begin, longest(sequence, least_tiles(number)))};
    };
    for (int n = warp; n < CLASSES; n += warps) {
        int count = 0;
        for (int i = lane; i < p.sequences; i += 32) {
            const Blocks blocks = blocks_of(Sequence(p, i), CLASSES - 1 - n);
            count += blocks.end - blocks.begin;
        }
        for (int offset = 16; offset > 0; offset /= 2)
            count += __shfl_xor_sync(0xffffffff, count, offset);
        if (lane == 0) counts[n] = count;
    }
    __syncthreads();  // all counts are there
    for (int n = warp; n < CLASSES; n += warps) {
        int next = 0;  // the place of the class's next work
        for (int longer = 0; longer < n; ++longer) next += counts[longer];
        for (int start = 0; start < p.sequences; start += 32) {
            const int i = min(start + lane, p.sequences - 1);
            Blocks blocks = blocks_of(Sequence(p, i), CLASSES - 1 - n);
            if (start + lane >= p.sequences) blocks.end = blocks.begin;
            int behind = blocks.end - blocks.begin;  // the place behind this lane's
            for (int distance = 1; distance < 32; distance *= 2) {
                const int before = __shfl_up_sync(0xffffffff, behind, distance);
                if (lane >= distance) behind += before;
            }
            Listed* place = work_list(p).works + next + behind;
            for (int block = blocks.end - 1; block >= blocks.begin; --block)
                *--place = {.sequence = i, .k_block = block};
            next += __shfl_sync(0xffffffff, behind, 31);
        }
        if (n == CLASSES - 1 && lane == 0) work_list(p).count = next, work_list(p).taken = 0;
    }
}

// Of each query: lse in units of log2, +inf where no key is visible and past the last query, so that
// P = 2^(S - lse) is 0 there; delta = rowsum(dO * O)  [heads, places of tiles]. And dQ = 0; and the list.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    attention_delta(const __grid_constant__ BackwardLengthsParams p) {
    griddepcontrol_launch_dependents();  // attention_backward may begin
    DeltaMemory& smem = shared_memory<DeltaMemory>();
    if (blockIdx.x == 0) list_works(p, smem.count);
    const int head = blockIdx.x / num_places(p), place = blockIdx.x % num_places(p);
    const Sequence sequence(p, sequence_of(p, place));
    const int tile = place - sequence.place;
    if (tile >= sequence.q_tiles()) return;  // nobody's
    const int q_start = sequence.q_begin + tile * BLOCK_M;
    const Element* o = p.o + sequence.batch * p.o_stride.batch + head * p.o_stride.head;
    const Element* dout = p.dout + sequence.batch * p.dout_stride.batch + head * p.dout_stride.head;
    Rows& rows = static_cast<Rows*>(p.workspace[0])[blockIdx.x];

    float largest = 0.0f;
    for (int r = threadIdx.x / LANES; r < BLOCK_M; r += ROW_THREADS / LANES) {
        const int row = q_start + r;
        const bool is_query = row < sequence.q_end;  // all lanes take part in the shuffles
        float delta = 0.0f;
        for (int d = threadIdx.x % LANES * VEC; is_query && d < HEAD_DIM; d += LANES * VEC) {
            float x[VEC], y[VEC];
            load_vector(x, dout + row * p.dout_stride.row + d);
            load_vector(y, o + row * p.o_stride.row + d);
#pragma unroll
            for (int n = 0; n < VEC; ++n) {
                delta += x[n] * y[n];
                largest = fmaxf(largest, fabsf(x[n]));
            }
        }
        for (int offset = LANES / 2; offset > 0; offset /= 2)
            delta += __shfl_xor_sync(0xffffffff, delta, offset);
        if (threadIdx.x % LANES == 0) {
            float lse = INFINITY;
            if (is_query) {
                lse = p.lse[(int64_t(sequence.batch) * p.heads + head) * p.seq_q + row];
                lse = lse == -INFINITY ? INFINITY : lse * LOG2_E;
            }
            rows.lse[r] = lse;
            rows.delta[r] = delta;
        }
    }
    float* dq = reinterpret_cast<float*>(static_cast<DqTile*>(p.workspace[1])[blockIdx.x]);
    for (int n = 4 * threadIdx.x; n < sizeof(DqTile) / sizeof(float); n += 4 * ROW_THREADS)
        store_float4(&dq[n], make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    if (IS_FP16<Element>) {
        largest = warp_max(largest);
        if (threadIdx.x % 32 == 0) smem.largest[threadIdx.x / 32] = largest;
        __syncthreads();  // every warp's part is there
        for (float of_warp : smem.largest) largest = fmaxf(largest, of_warp);
        if (threadIdx.x == 0) largest_of_tiles(p)[blockIdx.x] = largest;
    }
}

// A stage's barriers complete one phase per tile. Phase -1 counts as completed from the beginning: a
// new stage is empty.
__device__ void wait_for(Mbarrier& barrier, int phase) {
    while (!mbarrier_try_wait_parity(barrier, phase & 1)) {
    }
}

// Uniform across the warp; the shuffle tells the compiler so.
__device__ int warp_number() { return __shfl_sync(0xffffffff, threadIdx.x / 32, 0); }

// By all lanes of a warp, which has read a stage, or will not read it.
__device__ void release(Mbarrier& empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
}

// Rows of Q, dO and dQ in 32 MB, less than the L2 cache holds.
constexpr int SECTION_ROWS = (32 << 20) / (HEAD_DIM * (2 * sizeof(Element) + sizeof(float)));

// Work n of the launch. The works of a few heads, whose Q, dO and dQ stay in L2, come one after
// another, and of these the longest first.
__device__ Work make_work(const BackwardLengthsParams& p, uint32_t n) {
    const WorkList& list = work_list(p);
    const uint32_t count = list.count;
    if (n >= count * p.kv_heads) return {};
    Work work;
    work.group = p.heads / p.kv_heads;
    const float rows = float(p.batch) * p.seq_q * work.group;
    const int section_heads = fminf(fmaxf(SECTION_ROWS / rows, 1.0f), p.kv_heads);
    const int first_head = n / (count * section_heads) * section_heads;
    const uint32_t in_section = n - count * first_head;
    const int heads = min(section_heads, p.kv_heads - first_head);
    const Listed listed = list.works[in_section / heads];
    const Sequence sequence(p, listed.sequence);
    work.first_key = sequence.k_begin + listed.k_block * BLOCK_N;
    work.k_used = sequence.k_used;
    work.k_end = sequence.k_end;
    work.kv_head = first_head + in_section % heads;
    work.batch = sequence.batch;
    work.q_begin = sequence.q_begin;
    work.q_end = sequence.q_end;
    work.own_key = sequence.k_used - sequence.q_end;
    work.place = sequence.place;
    work.q_tiles = sequence.q_tiles();
    work.first_head = work.kv_head * work.group;
    // The queries whose windows have one of the keys: those whose own keys are first_key - right ... last
    // key + left. As 64 bits no sum overflows.
    const int64_t first_own = sequence.q_begin + work.own_key;
    const int64_t first = int64_t(work.first_key) - window_right(p) - first_own;
    const int last_key = min(work.first_key + BLOCK_N, work.k_used) - 1;
    const int64_t last = int64_t(last_key) + p.window_left - first_own;
    const int64_t last_tile = work.q_tiles - 1;
    work.first_tile = min(max(first, int64_t(0)) / BLOCK_M, last_tile);
    work.end_tile = min(max(last, int64_t(0)) / BLOCK_M, last_tile) + 1;
    if (last < 0 || work.end_tile <= work.first_tile) work.end_tile = work.first_tile + 1;
    work.num_tiles = work.group * (work.end_tile - work.first_tile);
    // Without a window many blocks are at the same tiles at the same time, which come from L2. With one
    // each is somewhere else: then L2 has room for the tiles of fewer heads.
    work.head_by_head = p.window_left != UNLIMITED;
    // Each block is a step behind its neighbour: they do not add to the same dQ at the same time.
    const int steps = listed.k_block % work.num_tiles;
    const int tiles =
        work.head_by_head ? steps % (work.end_tile - work.first_tile) : steps / work.group;
    work.start_tile = work.end_tile - 1 - tiles;
    work.start_head = work.first_head + (work.head_by_head ? 0 : steps % work.group);
    return work;
}

// By all lanes of a warp: the block's work of a round, which is there until release_work.
__device__ const Work& wait_for_work(SharedMemory& smem, int round) {
    wait_for(smem.work_full[round % 2], round / 2);
    return smem.works[round % 2];
}
__device__ void release_work(SharedMemory& smem, int round) { release(smem.work_empty[round % 2]); }

// ---- load K and V, and the tiles
__device__ void load(const BackwardLengthsParams& p, SharedMemory& smem) {
    int i = 0;                     // tiles of all works so far
    uint32_t ticket = blockIdx.x;  // the block's first work; then, whichever is next
    const Rows* rows = static_cast<const Rows*>(p.workspace[0]);
    for (int round = 0;; ++round, ticket = gridDim.x + take_ticket(&work_list(p).taken)) {
        Work& work = smem.works[round % 2];
        wait_for(smem.work_empty[round % 2], round / 2 - 1);
        work = make_work(p, ticket);
        mbarrier_arrive(smem.work_full[round % 2]);
        if (work.num_tiles == 0) return;
        Walk at(work);
        for (int n = 0; n < work.num_tiles; ++n, ++i, at.next(work)) {
            const int q_stage = i % Q_STAGES, dout_stage = i % DOUT_STAGES;
            const int q_start = work.q_begin + at.tile * BLOCK_M;
            Mbarrier &q_full = smem.q_full[q_stage], &dout_full = smem.dout_full[dout_stage];
            wait_for(smem.q_empty[q_stage], i / Q_STAGES - 1);
            smem.own_key[q_stage] = q_start + work.own_key;
            mbarrier_arrive_expect_tx(q_full, sizeof(smem.q[0]) + sizeof(Rows));
            load_tile(smem.q[q_stage], p.q_map, p.seq_q, q_start, work.q_end, at.head, work.batch,
                      q_full);
            cp_async_bulk_load(&smem.rows[q_stage], rows + tile_index(p, work, at.head, at.tile),
                               sizeof(Rows), q_full);
            wait_for(smem.dout_empty[dout_stage], i / DOUT_STAGES - 1);
            mbarrier_arrive_expect_tx(dout_full, sizeof(smem.dout[0]));
            load_tile(smem.dout[dout_stage], p.dout_map, p.seq_q, q_start, work.q_end, at.head,
                      work.batch, dout_full);
            if (n == 0) {  // V before K, which is read for longer in the work before
                wait_for(smem.v_empty, round - 1);
                mbarrier_arrive_expect_tx(smem.v_full, sizeof(smem.v));
                load_tile(smem.v, p.v_map, p.seq_k, work.first_key, work.k_used, work.kv_head,
                          work.batch, smem.v_full);
                wait_for(smem.k_empty, round - 1);
                mbarrier_arrive_expect_tx(smem.k_full, sizeof(smem.k));
                load_tile(smem.k, p.k_map, p.seq_k, work.first_key, work.k_used, work.kv_head,
                          work.batch, smem.k_full);
            }
        }
    }
}

// ---- dQ joins the sum over all keys: a warp for each warpgroup, whose part it adds
__device__ void add_dq(const BackwardLengthsParams& p, SharedMemory& smem, int warpgroup) {
    for (int round = 0;; ++round) {
        const Work& work = wait_for_work(smem, round);
        if (work.num_tiles == 0) return;
        Walk at(work);
        for (int n = 0; n < work.num_tiles; ++n, at.next(work)) {
            bar_sync(DQ_FULL_BARRIER + warpgroup, 160);
            if (threadIdx.x % 32 == 0) {
                DqTile* sums = static_cast<DqTile*>(p.workspace[1]);
                DqTile& sum = sums[tile_index(p, work, at.head, at.tile)];
                cp_reduce_async_bulk_add(dq_part(sum, warpgroup)[0][0],
                                         smem.staging[warpgroup][0][0],
                                         dq_columns(warpgroup) / 8 * sizeof(DqColumns));
                cp_async_bulk_commit_group();
                cp_async_bulk_wait_group_read<0>();
            }
            __syncwarp();
            bar_arrive(DQ_EMPTY_BARRIER + warpgroup, 160);
        }
        release_work(smem, round);
    }
}

// A lane's s[n][2 r + i], with r and i 0 or 1, is the element of S^T in row 8 r + lane / 4 of its
// warp's 16 keys and column 8 n + 2 (lane % 4) + i; so are those of the other accumulators.

// s = P = 2^(s - lse), for keys from `first_key` on, of which `keys` are there, and queries whose own
// keys begin with own_key
__device__ void exponentials(float (&s)[BLOCK_M / 8][4], const BackwardLengthsParams& p,
                             const Rows& rows, int first_key, int keys, int own_key) {
    const int lane = threadIdx.x % 32;
    const float scale_log2 = p.softmax_scale * LOG2_E;
#pragma unroll
    for (int n = 0; n < BLOCK_M / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            s[n][i] =
                ex2_approx_ftz(s[n][i] * scale_log2 - rows.lse[8 * n + 2 * (lane % 4) + i % 2]);
    // A key past the last one is no row of dK and dV, but it would add to dQ.
    const int left = p.window_left, right = window_right(p);
    const int distance = first_key - own_key;  // of the first key from the first query's own
    if (keys < 16 || distance + 15 > right || distance - (BLOCK_M - 1) < -left) {
#pragma unroll
        for (int n = 0; n < BLOCK_M / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = 8 * (i / 2) + lane / 4;
                const int from_own = distance + key - (8 * n + 2 * (lane % 4) + i % 2);
                if (key >= keys || from_own > right || from_own < -left) s[n][i] = 0.0f;
            }
    }
}

// dp = dS = factor P (dp - delta)
__device__ void scores_gradient(float (&dp)[BLOCK_M / 8][4], const float (&prob)[BLOCK_M / 8][4],
                                const Rows& rows, float factor) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < BLOCK_M / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float delta = rows.delta[8 * n + 2 * (lane % 4) + i % 2];
            dp[n][i] = prob[n][i] * (dp[n][i] * factor - delta * factor);
        }
}

// ---- all five products of the warpgroup's 64 keys. Each warpgroup has a code of its own, in which its
// number is known: the descriptors of K and V are constants, and dQ has no columns past the last one.
template <int WARPGROUP>
__device__ void compute(const BackwardLengthsParams& p, SharedMemory& smem, int warp) {
    const int lane = threadIdx.x % 32;
    const int group_row = 64 * WARPGROUP;  // the warpgroup's first key in the block
    const int warp_row = 16 * warp;        // and the warp's
    DqColumns* dq_staging = smem.staging[WARPGROUP];
    Tile<64>& dk_staging = reinterpret_cast<Tile<64>&>(smem.staging[WARPGROUP]);
    Tile<64>& dv_staging = reinterpret_cast<Tile<64>*>(smem.ds)[WARPGROUP];

    // Ping-pong scheduling: the warpgroups start their products in turn, so that the products of one
    // run while the other one computes P and dS. Nobody takes the last turn.
    const auto wait_for_turn = [&] { bar_sync(TURN_BARRIER + WARPGROUP, 128 * CONSUMERS); };
    const auto pass_turn = [&] { bar_arrive(TURN_BARRIER + 1 - WARPGROUP, 128 * CONSUMERS); };
    if (WARPGROUP == 1) pass_turn();  // the first turn is warpgroup 0's

    int i = 0;  // tiles of all works so far
    for (int round = 0;; ++round) {
        const Work& work = wait_for_work(smem, round);
        const int num_tiles = work.num_tiles;
        if (num_tiles == 0) break;
        const float factor = factor_of(p, work.place, work.q_tiles, work.kv_head);
        const int first_key = work.first_key + warp_row, keys = work.k_used - first_key;
        float dk_acc[DIM / 8][4] = {}, dv_acc[DIM / 8][4] = {};
        float dq_acc[dq_columns(WARPGROUP) / 8][4];

        // Starts dQ = dS K of tile i  [BLOCK_M, HEAD_DIM], a part in each warpgroup
        const auto start_dq = [&](int i) {
            wait_for(smem.ds_full[i % DS_STAGES], i / DS_STAGES);
            multiply_dq(dq_acc, smem.ds[i % DS_STAGES], smem.k, WARPGROUP);
        };
        // dQ of the work's tile n, to the warp that adds it
        const auto store_dq = [&](int n) {
            if (n > 0) bar_sync(DQ_EMPTY_BARRIER + WARPGROUP, 160);  // dQ's place is free
#pragma unroll
            for (int j = 0; j < dq_columns(WARPGROUP) / 8; ++j) {
                const float* x = dq_acc[j];
                store_float4(dq_staging[j][threadIdx.x % 128], make_float4(x[0], x[1], x[2], x[3]));
            }
            fence_proxy_async();                           // by each writer of dQ
            bar_arrive(DQ_FULL_BARRIER + WARPGROUP, 160);  // dQ is complete
        };

        // The work's tile n; dQ of the one before, whose dS is there from both warpgroups
        const auto tile_step = [&](int n, auto first) {
            constexpr bool IS_FIRST = decltype(first)::value;
            const int q_stage = i % Q_STAGES, dout_stage = i % DOUT_STAGES;

            // ---- S^T = K Q^T, dP^T = V dO^T  [BLOCK_N, BLOCK_M], [64, BLOCK_M] in each warpgroup
            float s_acc[BLOCK_M / 8][4], dp_acc[BLOCK_M / 8][4];
            wait_for(smem.q_full[q_stage], i / Q_STAGES);
            multiply(s_acc, smem.k, group_row, smem.q[q_stage]);
            wait_for(smem.dout_full[dout_stage], i / DOUT_STAGES);
            multiply(dp_acc, smem.v, group_row, smem.dout[dout_stage]);
            pass_turn();

            // ---- P = 2^(S - lse), dS = P * (dP - delta)
            uint32_t p_frag[BLOCK_M / 16][4], ds_frag[BLOCK_M / 16][4];
            wgmma_wait_group<1>(s_acc);
            exponentials(s_acc, p, smem.rows[q_stage], first_key, keys, smem.own_key[q_stage]);
            convert(p_frag, s_acc);
            wgmma_wait_group<0>(dp_acc);
            scores_gradient(dp_acc, s_acc, smem.rows[q_stage], factor);
            convert(ds_frag, dp_acc);
            if (IS_FIRST && round > 0) {
                if (lane == 0) cp_async_bulk_wait_group_read<0>();
                bar_sync(CONSUMERS_BARRIER, 128 * CONSUMERS);  // dK and dV have left their places
            }
            store_rows(smem.ds[i % DS_STAGES], warp_row, 0, ds_frag);
            fence_proxy_async();  // by each writer of dS
            release(smem.ds_full[i % DS_STAGES]);

            // ---- dV += P^T dO, dK += dS^T Q  [BLOCK_N, HEAD_DIM], [64, DIM] in each warpgroup; and
            // dQ of the tile before
            wait_for_turn();
            multiply_add(dv_acc, p_frag, smem.dout[dout_stage]);
            if constexpr (!IS_FIRST) start_dq(i - 1);
            multiply_add(dk_acc, ds_frag, smem.q[q_stage]);
            if constexpr (!IS_FIRST) {
                wgmma_wait_group<1>(dq_acc);
                release(smem.dout_empty[dout_stage]);
                store_dq(n - 1);
            }
            wgmma_wait_group<0>(dv_acc, dk_acc, p_frag, ds_frag);
            if constexpr (IS_FIRST) release(smem.dout_empty[dout_stage]);
            release(smem.q_empty[q_stage]);
            ++i;
        };

        // ---- for each Q/dO tile of each head of the group
        wait_for(smem.k_full, round);
        wait_for(smem.v_full, round);
        wait_for_turn();
        tile_step(0, std::true_type());
        for (int n = 1; n < num_tiles; ++n) tile_step(n, std::false_type());
        release(smem.v_empty);
        start_dq(i - 1);
        pass_turn();
        wgmma_wait_group<0>(dq_acc);
        release(smem.k_empty);
        store_dq(num_tiles - 1);

        // ---- write dK and dV, in the places of dQ and dS, while the next K and V arrive
        bar_sync(DQ_EMPTY_BARRIER + WARPGROUP, 160);  // the last dQ has left
        write(p.dk_map, p.seq_k, first_key, work.k_end, work.kv_head, work.batch, dk_staging,
              warp_row % 64, dk_acc, p.softmax_scale / factor);
        bar_sync(CONSUMERS_BARRIER, 128 * CONSUMERS);  // all products have read dS
        write(p.dv_map, p.seq_k, first_key, work.k_end, work.kv_head, work.batch, dv_staging,
              warp_row % 64, dv_acc, 1.0f);
        release_work(smem, round);
    }
    if (lane == 0) cp_async_bulk_wait_group_read<0>();
}

// dK = scale dS^T Q, dV = P^T dO, summed over the query heads of a group
// [batch, kv_heads, seq_k, HEAD_DIM]; dQ += dS K  [batch, heads, seq_q, HEAD_DIM]
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_backward(const __grid_constant__ BackwardLengthsParams p) {
    SharedMemory& smem = shared_memory<SharedMemory>();
    const int warp = warp_number();

    if (threadIdx.x == 0) {
        mbarrier_init(smem.k_full, 1);
        mbarrier_init(smem.v_full, 1);
        mbarrier_init(smem.k_empty, 4 * CONSUMERS);
        mbarrier_init(smem.v_empty, 4 * CONSUMERS);
#pragma unroll
        for (int stage = 0; stage < Q_STAGES; ++stage) {
            mbarrier_init(smem.q_full[stage], 1);
            mbarrier_init(smem.q_empty[stage], 4 * CONSUMERS);
        }
#pragma unroll
        for (int stage = 0; stage < DOUT_STAGES; ++stage) {
            mbarrier_init(smem.dout_full[stage], 1);
            mbarrier_init(smem.dout_empty[stage], 4 * CONSUMERS);
        }
#pragma unroll
        for (int stage = 0; stage < DS_STAGES; ++stage)
            mbarrier_init(smem.ds_full[stage], 4 * CONSUMERS);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            mbarrier_init(smem.work_full[n], 1);
            mbarrier_init(smem.work_empty[n], 4 * CONSUMERS + CONSUMERS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();  // the mbarriers are initialized
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();  // what attention_delta has written is there: the list, and dQ = 0

    if (warp >= PRODUCER_WARP) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == PRODUCER_WARP) {
            if (threadIdx.x % 32 == 0) load(p, smem);
        } else if (warp <= PRODUCER_WARP + CONSUMERS) {
            add_dq(p, smem, warp - PRODUCER_WARP - 1);
        }
        return;
    }
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    if (warp < 4)
        compute<0>(p, smem, warp);
    else
        compute<1>(p, smem, warp);
}

// dQ in its order and type  [batch, heads, seq_q, HEAD_DIM]
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    attention_round(const __grid_constant__ BackwardLengthsParams p) {
    Tile<BLOCK_M>& tile = shared_memory<Tile<BLOCK_M>>();
    const int head = blockIdx.x / num_places(p), place = blockIdx.x % num_places(p);
    const int warpgroup = threadIdx.x / 128;
    const Sequence sequence(p, sequence_of(p, place));
    const int q_start = sequence.q_begin + (place - sequence.place) * BLOCK_M;
    griddepcontrol_wait();  // all sums are complete
    if (q_start >= sequence.q_end) return;
    DqTile& sum = static_cast<DqTile*>(p.workspace[1])[blockIdx.x];
    const int kv_head = head / (p.heads / p.kv_heads);
    const float scale = p.softmax_scale / factor_of(p, sequence.place, sequence.q_tiles(), kv_head);

    float dq_acc[PANEL / 8][4] = {};
#pragma unroll
    for (int n = 0; n < PANEL / 8; ++n) {
        if (n >= dq_columns(warpgroup) / 8) break;
        const float4 part = load_float4(dq_part(sum, warpgroup)[n][threadIdx.x % 128]);
        const float x[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) dq_acc[n][i] = scale * x[i];
    }
    uint32_t dq_frag[PANEL / 16][4];
    convert(dq_frag, dq_acc);
    const int row = threadIdx.x % 128 / 32 * 16;
    if (DQ_BY_ROWS)
        store_rows(tile, 64 * warpgroup + row, 0, dq_frag);
    else
        store_rows(tile, row, PANEL * warpgroup, dq_frag);
    fence_proxy_async();  // by each writer
    __syncthreads();      // the tile is complete
    if (threadIdx.x == 0) {
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel)
            cp_async_bulk_tensor_5d_store(p.dq_map, PANEL * panel,
                                          p.seq_q - sequence.q_end + q_start, head, sequence.batch,
                                          sequence.q_end, tile[panel][0]);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read<0>();
    }
}
