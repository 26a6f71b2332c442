// b10 -- equal shares: one block begins a work, the next one finishes it; and blocks walk in phase
// change: as in v12, without a mask all blocks get the same number of tiles of queries. Where that cuts
//     a work, one block computes its first tiles at the beginning of its share, and leaves dK and dV in
//     global memory; the next one goes on from there at its end. With a mask, works are walked upward
//     in every second round of a section, not in its second half
// why: 2048 works on 132 SMs are 15.5 rounds and take 16; predicted: 1.03 times b08 without a mask. With
//     one, where a section has four rounds, b08's blocks are at tiles all over the sequence, far more
//     than L2 holds; predicted: 1.05 times with 64 heads on 8 and 65536 queries
// limits: bf16, fp16; head_dim 8-128 by 8; sm_90a
//     needs 4 bytes of workspace for each element of dQ, and without a mask up to 19 MB
// repeats: all bits but dq's, dk's, dv's; blocks add to dq in any order. dk and dv repeat on one GPU,
//     but with another number of SMs their terms come in another order
// parts: attention_backward adds to workspace 1, any number of times between attention_delta and
//     attention_round
#include "backward.cuh"
#include "bulk.cuh"
#include "dependent_launch.cuh"
#include "mma.cuh"
#include "signal.cuh"
#include "ticket.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

constexpr int CONSUMERS = 2;  // warpgroups that compute; one more loads and adds dQ to its sum
constexpr int NUM_THREADS = 128 * (CONSUMERS + 1);
constexpr int PRODUCER_WARP = 4 * CONSUMERS;  // starts all loads; the next ones add dQ
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
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

// What a block works on at a time: BLOCK_N keys, and the tiles of queries that see them, of each query
// head of the keys' group; or a piece of that.
struct Work {
    int first_key, kv_head, batch;
    int first_head, group;
    int first_tile, end_tile;
    int num_tiles;  // of all heads, or of the piece; none: there are no more works
    int start_tile, start_head, step;  // where the walk through the tiles begins, and its direction
    int share;
    bool is_rest, is_begun;  // begun in the share before; left for the next one
    bool has_next;           // the share has another piece
};

// A walk through a work's tiles, of each all heads, once around: behind the last tile is the first.
struct Walk {
    int tile, head;

    __device__ explicit Walk(const Work& work) : tile(work.start_tile), head(work.start_head) {}

    __device__ void next(const Work& work) {
        if (++head < work.first_head + work.group) return;
        head = work.first_head;
        tile += work.step;
        if (tile == work.end_tile) tile = work.first_tile;
        if (tile < work.first_tile) tile = work.end_tile - 1;
    }
};

// Of Rows, and of DqTile.
__device__ int64_t tile_index(const BackwardParams& p, const Work& work, int head, int tile) {
    return (int64_t(work.batch) * p.heads + head) * work.end_tile + tile;
}

// What a block leaves of a work that it has begun: dK and dV. The thread of the same number goes on
// with them.
struct HandedOver {
    float dk[DIM / 8][128 * CONSUMERS][4], dv[DIM / 8][128 * CONSUMERS][4];
    Signal ready[4 * CONSUMERS];  // of each warp
};
constexpr int MAX_BLOCKS = 144;  // no device of this architecture has more SMs
// Pieces, and handing over, cost some tiles' time; each block must save more than that.
constexpr int MIN_SAVED_TILES = 20;

// The transpose of dS.
using DsTile = Element[BLOCK_M / PANEL][BLOCK_N][PANEL];

struct alignas(SWIZZLE_128B_TILE) SharedMemory {
    Tile<BLOCK_N> k, v;
    Tile<BLOCK_M> q[Q_STAGES];
    Tile<BLOCK_M> dout[DOUT_STAGES];
    DsTile ds[DS_STAGES];                     // in the end dV
    DqColumns staging[CONSUMERS][PANEL / 8];  // dQ, on its way to its sum; in the end dK
    Rows rows[Q_STAGES];                      // arrive with Q
    int q_start[Q_STAGES];                    // the tile's first query
    Mbarrier k_full, v_full, q_full[Q_STAGES], dout_full[DOUT_STAGES];      // the tile has arrived
    Mbarrier k_empty, v_empty, q_empty[Q_STAGES], dout_empty[DOUT_STAGES];  // all have read it
    Mbarrier ds_full[DS_STAGES];                                            // all of dS is there
    Work works[2];  // this one, and the next
    Mbarrier work_full[2], work_empty[2];
};
static_assert(sizeof(SharedMemory) <= 227 * 1024);

constexpr int ROW_THREADS = 128 * CONSUMERS;  // of attention_delta and attention_round
constexpr int LANES = 16;                     // threads that share a row of attention_delta
using WarpFloats = float[ROW_THREADS / 32];

template <typename T>
constexpr bool IS_FP16 = false;
template <>
constexpr bool IS_FP16<fp16> = true;

extern "C" {
__constant__ int32_t kernels_start_early = 1;
__constant__ BackwardDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_delta",
                 .grid = {{SEQ_Q, BLOCK_M}, {HEADS, 1}, {BATCH, 1}},
                 .threads = ROW_THREADS,
                 .smem_bytes = sizeof(WarpFloats)},
                {.name = "attention_backward",
                 .grid = {{SEQ_K, BLOCK_N}, {KV_HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS,
                 .smem_bytes = sizeof(SharedMemory),
                 .blocks_per_sm = 1},
                {.name = "attention_round",
                 .grid = {{SEQ_Q, BLOCK_M}, {HEADS, 1}, {BATCH, 1}},
                 .threads = ROW_THREADS,
                 .smem_bytes = sizeof(Tile<BLOCK_M>)}},
    .workspace = {{.element_bytes = sizeof(Rows) / BLOCK_M + sizeof(int) +
                                    (IS_FP16<Element> ? sizeof(float) : 0),
                   .shape = {{BATCH, 1}, {HEADS, 1}, {SEQ_Q, BLOCK_M}}},
                  {.element_bytes = sizeof(DqTile) / BLOCK_M,
                   .shape = {{BATCH, 1}, {HEADS, 1}, {SEQ_Q, BLOCK_M}}},
                  {CAUSAL ? 0 : MAX_BLOCKS * sizeof(HandedOver)}},
    .q_box = {BLOCK_M, PANEL, SWIZZLE_128B},
    .k_box = {BLOCK_N, PANEL, SWIZZLE_128B},
    .v_box = {BLOCK_N, PANEL, SWIZZLE_128B},
    .dout_box = {BLOCK_M, PANEL, SWIZZLE_128B},
    .dq_box = {BLOCK_M, PANEL, SWIZZLE_128B},
    .dk_box = {16, PANEL, SWIZZLE_128B},
    .dv_box = {16, PANEL, SWIZZLE_128B},
};
}

// Starts tile[panel][r][col] = tensor[row + r][PANEL panel + col], zeros past its ends. Called by one
// thread.
template <int ROWS>
__device__ void load_tile(Tile<ROWS>& tile, const TensorMap& map, int row, int head, int batch,
                          Mbarrier& full) {
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
        cp_async_bulk_tensor_load(tile[panel][0], map, PANEL * panel, row, head, batch, full);
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
// of the tile. TMA leaves out what lies past the tensor's ends.
template <int TILES, int ROWS>
__device__ void write(const TensorMap& map, int first_row, int head, int batch, Tile<ROWS>& tile,
                      int row, float (&acc)[TILES][4], float factor) {
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
            cp_async_bulk_tensor_store(map, PANEL * panel, first_row, head, batch,
                                       tile[panel][row]);
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

// Workspace 0 behind Rows: the number of works that blocks have taken after their first ones, and of
// each tile of queries, in fp16, the largest |dO|.
__device__ int* works_taken(const BackwardParams& p) {
    const int q_tiles = (p.seq_q + BLOCK_M - 1) / BLOCK_M;
    Rows* rows = static_cast<Rows*>(p.workspace[0]);
    return reinterpret_cast<int*>(rows + int64_t(p.batch) * p.heads * q_tiles);
}
__device__ float* largest_of_tiles(const BackwardParams& p) {
    return reinterpret_cast<float*>(works_taken(p) + 1);
}

// The maximum of x over the warp, known to all its lanes.
__device__ float warp_max(float x) {
    for (int offset = 16; offset > 0; offset /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, offset));
    return x;
}

// What dS is multiplied by before it is rounded to an operand, a power of two. In fp16 dS may be
// beyond the largest number, or below the smallest, where the gradients are not: 1 / factor is 16
// to 32 times the largest |dO| of these tiles.
__device__ float ds_factor(const float* tiles, int num_tiles) {
    if (!IS_FP16<Element>) return 1.0f;
    float largest = 0.0f;
    for (int n = threadIdx.x % 32; n < num_tiles; n += 32) largest = fmaxf(largest, tiles[n]);
    int exponent;
    frexpf(warp_max(largest), &exponent);
    return ldexpf(1.0f, -exponent - 4);
}

// That of all works of a key head: dQ of its query heads is summed with it, and dK.
__device__ float factor_of(const BackwardParams& p, int batch, int kv_head) {
    const int tiles = (p.seq_q + BLOCK_M - 1) / BLOCK_M * (p.heads / p.kv_heads);
    return ds_factor(largest_of_tiles(p) + (batch * p.kv_heads + kv_head) * tiles, tiles);
}

// Of each query: lse in units of log2, +inf where no key is visible and past the last query, so that
// P = 2^(S - lse) is 0 there; delta = rowsum(dO * O)  [batch, heads, seq_q in whole tiles]. And dQ = 0.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    attention_delta(const __grid_constant__ BackwardParams p) {
    griddepcontrol_launch_dependents();  // attention_backward may begin to load
    const int q_tiles = (p.seq_q + BLOCK_M - 1) / BLOCK_M;
    const int block = gridDim.x - 1 - blockIdx.x;  // so that L2 has those of the first works
    const int head = block / q_tiles % p.heads;
    const int batch = block / q_tiles / p.heads;
    const Element* o = p.o + batch * p.o_stride.batch + head * p.o_stride.head;
    const Element* dout = p.dout + batch * p.dout_stride.batch + head * p.dout_stride.head;
    Rows& rows = static_cast<Rows*>(p.workspace[0])[block];

    if (blockIdx.x == 0 && threadIdx.x == 0) *works_taken(p) = 0;

    float largest = 0.0f;
    for (int r = threadIdx.x / LANES; r < BLOCK_M; r += ROW_THREADS / LANES) {
        const int i = block % q_tiles * BLOCK_M + r;
        const int row = min(i, p.seq_q - 1);  // all lanes take part in the shuffles
        float delta = 0.0f;
        for (int d = threadIdx.x % LANES * VEC; d < HEAD_DIM; d += LANES * VEC) {
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
            if (i < p.seq_q) {
                lse = p.lse[(int64_t(batch) * p.heads + head) * p.seq_q + i];
                lse = lse == -INFINITY ? INFINITY : lse * LOG2_E;
            }
            rows.lse[r] = lse;
            rows.delta[r] = i < p.seq_q ? delta : 0.0f;
        }
    }
    float* dq = reinterpret_cast<float*>(static_cast<DqTile*>(p.workspace[1])[block]);
    for (int n = 4 * threadIdx.x; n < sizeof(DqTile) / sizeof(float); n += 4 * ROW_THREADS)
        store_float4(&dq[n], make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    if (IS_FP16<Element>) {
        auto& of_warps = shared_memory<WarpFloats>();
        largest = warp_max(largest);
        if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
        __syncthreads();  // every warp's part is there
        for (float of_warp : of_warps) largest = fmaxf(largest, of_warp);
        if (threadIdx.x == 0) largest_of_tiles(p)[block] = largest;
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

// Rows of Q, dO and dQ in 16 MB, which each half of the L2 cache holds. With a mask, twice as many: so
// that a section has two works for each SM, a long one and a short one.
constexpr int SECTION_ROWS =
    ((CAUSAL ? 32 : 16) << 20) / (HEAD_DIM * (2 * sizeof(Element) + sizeof(float)));

// A work of the launch, whose walk begins at a tile that is so much later than it would be. The works of
// a few heads, whose Q, dO and dQ stay in L2, come one after another, and of these those of the first
// keys first: with a mask they are the longest.
__device__ Work make_work(const BackwardParams& p, int n, int late) {
    const int k_blocks = (p.seq_k + BLOCK_N - 1) / BLOCK_N;
    const int all_heads = p.batch * p.kv_heads;
    const int section_heads = min(max(1, SECTION_ROWS / p.seq_q), all_heads);
    const int section = n / (section_heads * k_blocks);
    const int place = n % (section_heads * k_blocks);
    const int heads = min(section_heads, all_heads - section * section_heads);
    const int head = section * section_heads + place % heads;
    const int k_block = place / heads;
    Work work = {};
    work.first_key = k_block * BLOCK_N;
    work.kv_head = head % p.kv_heads;
    work.batch = head / p.kv_heads;
    work.group = p.heads / p.kv_heads;
    work.first_head = work.kv_head * work.group;
    // Causal: key j is seen by the queries i >= j + seq_q - seq_k.
    work.first_tile = CAUSAL ? max(0, work.first_key + p.seq_q - p.seq_k) / BLOCK_M : 0;
    work.end_tile = (p.seq_q + BLOCK_M - 1) / BLOCK_M;
    // At least one: the last query sees all keys.
    work.num_tiles = work.group * (work.end_tile - work.first_tile);
    // With a mask, blocks that begin a round together end it one after another, the one with the
    // shortest work first, and in that order take the next works, the longest first. Walked upward,
    // these are all at the same tile, which comes from L2, and end together: the third round begins
    // like the first. Each is a step behind its neighbour: they do not add to the same dQ at the same
    // time.
    const bool upward = CAUSAL && place / int(gridDim.x) % 2 == 1;
    const int steps = (k_block + late) % work.num_tiles;
    work.step = upward ? 1 : -1;
    work.start_tile =
        (upward ? work.first_tile : work.end_tile - 1) + work.step * (steps / work.group);
    work.start_head = work.first_head + steps % work.group;
    return work;
}

// A place in the order of the works: before it are `work` of them, and `tile` tiles of the next.
struct Cut {
    int work, tile;
};

// Piece i of what a block does for a ticket: of a work, or of a share. Without a mask, the last one to
// two rounds of works are shared out equally among the blocks. (With one, the last works are short,
// and all blocks end at almost the same time.)
__device__ Work make_piece(const BackwardParams& p, int ticket, int i) {
    const int num_works = p.batch * p.kv_heads * ((p.seq_k + BLOCK_N - 1) / BLOCK_N);
    const int num_tiles = p.heads / p.kv_heads * ((p.seq_q + BLOCK_M - 1) / BLOCK_M);  // of a work
    const int blocks = gridDim.x, left = num_works % blocks;
    // In one more round all but `left` blocks would be idle. With equal shares each saves that part of a
    // work's time. (As float the product does not overflow.)
    const bool shares = !CAUSAL && left > 0 && blocks <= MAX_BLOCKS &&
                        float(blocks - left) * num_tiles >= MIN_SAVED_TILES * blocks;
    const int first_shared = shares ? num_works - left - blocks : num_works;
    if (ticket < first_shared) return make_work(p, ticket, 0);
    const int share = ticket - first_shared;
    if (!shares || share >= blocks) return {};
    const auto cut = [&](int share) {
        // A work has `blocks` parts.
        const int parts = share * (blocks + left), part = parts % blocks;
        // num_tiles * part / blocks, in which no product overflows
        const int tile = num_tiles / blocks * part + num_tiles % blocks * part / blocks;
        return Cut{first_shared + parts / blocks, tile};
    };
    const Cut begin = cut(share), end = cut(share + 1);
    // The last work comes first, which the share may only begin: that is then ready before another
    // block comes to it, at the end of the next share. A whole work between the two is walked around
    // from the tile at which the others are by then.
    const int n = end.work - (end.tile == 0) - i;
    const bool is_last = n == begin.work, is_begun = n == end.work;
    Work work = make_work(p, n, is_last ? begin.tile : is_begun ? 0 : end.tile);
    work.share = share;
    work.is_rest = is_last && begin.tile > 0;
    work.is_begun = is_begun;
    work.has_next = !is_last;
    work.num_tiles = (is_begun ? end.tile : num_tiles) - (is_last ? begin.tile : 0);
    return work;
}

// By all lanes of a warp: the block's work of a round, which is there until release_work.
__device__ const Work& wait_for_work(SharedMemory& smem, int round) {
    wait_for(smem.work_full[round % 2], round / 2);
    return smem.works[round % 2];
}
__device__ void release_work(SharedMemory& smem, int round) { release(smem.work_empty[round % 2]); }

// ---- load K and V, and the tiles
__device__ void load(const BackwardParams& p, SharedMemory& smem) {
    int i = 0;                // tiles of all works so far
    int ticket = blockIdx.x;  // the block's first work; then, whichever is next when it gets there
    int piece = 0;            // of that
    for (int round = 0;; ++round) {
        Work& work = smem.works[round % 2];
        wait_for(smem.work_empty[round % 2], round / 2 - 1);
        work = make_piece(p, ticket, piece);
        mbarrier_arrive(smem.work_full[round % 2]);
        if (work.num_tiles == 0) return;
        Walk at(work);
        for (int n = 0; n < work.num_tiles; ++n, ++i, at.next(work)) {
            const int q_stage = i % Q_STAGES, dout_stage = i % DOUT_STAGES;
            const int q_start = at.tile * BLOCK_M;
            const Rows* rows = static_cast<const Rows*>(p.workspace[0]);
            Mbarrier &q_full = smem.q_full[q_stage], &dout_full = smem.dout_full[dout_stage];
            wait_for(smem.q_empty[q_stage], i / Q_STAGES - 1);
            smem.q_start[q_stage] = q_start;
            mbarrier_arrive_expect_tx(q_full, sizeof(smem.q[0]) + sizeof(Rows));
            load_tile(smem.q[q_stage], p.q_map, q_start, at.head, work.batch, q_full);
            wait_for(smem.dout_empty[dout_stage], i / DOUT_STAGES - 1);
            mbarrier_arrive_expect_tx(dout_full, sizeof(smem.dout[0]));
            load_tile(smem.dout[dout_stage], p.dout_map, q_start, at.head, work.batch, dout_full);
            if (n == 0) {  // V before K, which is read for longer in the work before
                wait_for(smem.v_empty, round - 1);
                mbarrier_arrive_expect_tx(smem.v_full, sizeof(smem.v));
                load_tile(smem.v, p.v_map, work.first_key, work.kv_head, work.batch, smem.v_full);
                wait_for(smem.k_empty, round - 1);
                mbarrier_arrive_expect_tx(smem.k_full, sizeof(smem.k));
                load_tile(smem.k, p.k_map, work.first_key, work.kv_head, work.batch, smem.k_full);
            }
            if (i == 0) griddepcontrol_wait();  // attention_delta has written all rows
            cp_async_bulk_load(&smem.rows[q_stage], rows + tile_index(p, work, at.head, at.tile),
                               sizeof(Rows), q_full);
        }
        piece = work.has_next ? piece + 1 : 0;
        if (piece == 0) ticket = gridDim.x + take_ticket(works_taken(p));
    }
}

// ---- dQ joins the sum over all keys: a warp for each warpgroup, whose part it adds
__device__ void add_dq(const BackwardParams& p, SharedMemory& smem, int warpgroup) {
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

// s = P = 2^(s - lse), for keys from `first_key` on and queries from q_start on
__device__ void exponentials(float (&s)[BLOCK_M / 8][4], const BackwardParams& p, const Rows& rows,
                             int first_key, int q_start) {
    const int lane = threadIdx.x % 32;
    const float scale_log2 = p.softmax_scale * LOG2_E;
#pragma unroll
    for (int n = 0; n < BLOCK_M / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            s[n][i] =
                ex2_approx_ftz(s[n][i] * scale_log2 - rows.lse[8 * n + 2 * (lane % 4) + i % 2]);
    // A key past the last one is no row of dK and dV, but it would add to dQ.
    const int offset = p.seq_k - p.seq_q;
    const int tile_keys = CAUSAL ? min(p.seq_k, q_start + offset + 1) : p.seq_k;
    if (first_key + 16 > tile_keys) {
#pragma unroll
        for (int n = 0; n < BLOCK_M / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = first_key + 8 * (i / 2) + lane / 4;
                const int row = q_start + 8 * n + 2 * (lane % 4) + i % 2;
                if (key >= (CAUSAL ? min(p.seq_k, row + offset + 1) : p.seq_k)) s[n][i] = 0.0f;
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

// ---- hand dK and dV over to the block that finishes a work, and take them over
__device__ void hand_over(HandedOver& to, const float (&dk_acc)[DIM / 8][4],
                          const float (&dv_acc)[DIM / 8][4], int warp) {
#pragma unroll
    for (int n = 0; n < DIM / 8; ++n) {
        const float *dk = dk_acc[n], *dv = dv_acc[n];
        store_float4(to.dk[n][threadIdx.x], make_float4(dk[0], dk[1], dk[2], dk[3]));
        store_float4(to.dv[n][threadIdx.x], make_float4(dv[0], dv[1], dv[2], dv[3]));
    }
    post_signal(to.ready[warp]);
}
__device__ void take_over(HandedOver& from, float (&dk_acc)[DIM / 8][4],
                          float (&dv_acc)[DIM / 8][4], int warp) {
    take_signal(from.ready[warp]);
#pragma unroll
    for (int n = 0; n < DIM / 8; ++n) {
        const float4 dk = load_float4(from.dk[n][threadIdx.x]);
        const float4 dv = load_float4(from.dv[n][threadIdx.x]);
        dk_acc[n][0] = dk.x, dk_acc[n][1] = dk.y, dk_acc[n][2] = dk.z, dk_acc[n][3] = dk.w;
        dv_acc[n][0] = dv.x, dv_acc[n][1] = dv.y, dv_acc[n][2] = dv.z, dv_acc[n][3] = dv.w;
    }
}

// ---- all five products of the warpgroup's 64 keys. Each warpgroup has a code of its own, in which its
// number is known: the descriptors of K and V are constants, and dQ has no columns past the last one.
template <int WARPGROUP>
__device__ void compute(const BackwardParams& p, SharedMemory& smem, int warp) {
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

    HandedOver* const handed_over = static_cast<HandedOver*>(p.workspace[2]);
    int i = 0;  // tiles of all works so far
    for (int round = 0;; ++round) {
        const Work& work = wait_for_work(smem, round);
        const int num_tiles = work.num_tiles;
        if (num_tiles == 0) break;
        const float factor = factor_of(p, work.batch, work.kv_head);
        const int first_key = work.first_key + warp_row;
        float dk_acc[DIM / 8][4] = {}, dv_acc[DIM / 8][4] = {};
        // The block with the share before has an earlier ticket, or a lower number, and GPUs start blocks
        // in that order; and it hands over before it waits itself.
        if (!CAUSAL && work.is_rest) take_over(handed_over[work.share - 1], dk_acc, dv_acc, warp);
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
            exponentials(s_acc, p, smem.rows[q_stage], first_key, smem.q_start[q_stage]);
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
        const bool is_begun = !CAUSAL && work.is_begun;
        if (is_begun) hand_over(handed_over[work.share], dk_acc, dv_acc, warp);
        bar_sync(DQ_EMPTY_BARRIER + WARPGROUP, 160);  // the last dQ has left
        if (!is_begun)
            write(p.dk_map, first_key, work.kv_head, work.batch, dk_staging, warp_row % 64, dk_acc,
                  p.softmax_scale / factor);
        bar_sync(CONSUMERS_BARRIER, 128 * CONSUMERS);  // all products have read dS
        if (!is_begun)
            write(p.dv_map, first_key, work.kv_head, work.batch, dv_staging, warp_row % 64, dv_acc,
                  1.0f);
        release_work(smem, round);
    }
    if (lane == 0) cp_async_bulk_wait_group_read<0>();
}

// dK = scale dS^T Q, dV = P^T dO, summed over the query heads of a group
// [batch, kv_heads, seq_k, HEAD_DIM]; dQ += dS K  [batch, heads, seq_q, HEAD_DIM]
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_backward(const __grid_constant__ BackwardParams p) {
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
    // What attention_delta has written is there, dQ = 0 among it.
    griddepcontrol_wait();
    if (warp < 4)
        compute<0>(p, smem, warp);
    else
        compute<1>(p, smem, warp);
}

// dQ in its order and type  [batch, heads, seq_q, HEAD_DIM]
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    attention_round(const __grid_constant__ BackwardParams p) {
    Tile<BLOCK_M>& tile = shared_memory<Tile<BLOCK_M>>();
    const int q_tiles = (p.seq_q + BLOCK_M - 1) / BLOCK_M;
    const int block = gridDim.x - 1 - blockIdx.x;  // L2 has the sums of the last works
    const int q_start = block % q_tiles * BLOCK_M;
    const int head = block / q_tiles % p.heads;
    const int batch = block / q_tiles / p.heads;
    const int warpgroup = threadIdx.x / 128;
    griddepcontrol_wait();  // all sums are complete
    DqTile& sum = static_cast<DqTile*>(p.workspace[1])[block];
    const float scale = p.softmax_scale / factor_of(p, batch, head / (p.heads / p.kv_heads));

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
            cp_async_bulk_tensor_store(p.dq_map, PANEL * panel, q_start, head, batch,
                                       tile[panel][0]);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read<0>();
    }
}
