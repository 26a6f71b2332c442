// b06 -- warp specialization: one warp loads, two add dQ to its sum, and two warpgroups compute
// change: a producer warpgroup, which gives its registers to the two consumers: one of its warps
//     starts all loads, and one for each consumer the reductions; empty barriers and named barriers
//     instead of __syncthreads, so that a consumer waits only for what it needs; at head_dim 64 and
//     below, K and V in registers; above 128, where dK and dV of 64 keys exceed a thread's registers,
//     one consumer has P and dV of all keys and the other one dS and dK
// why: in b05 all warps wait for each other twice a tile, and nobody multiplies while they compute
//     the exponentials. FlashAttention-3 is built like this
// limits: bf16, fp16; head_dim 8-256 by 8; sm_90a
//     needs 4 bytes of workspace for each element of dQ
// repeats: all bits but dq's; blocks add to it in any order
#include "backward.cuh"
#include "bulk.cuh"
#include "mma.cuh"
#include "reduce_vector.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

constexpr int CONSUMERS = 2;  // warpgroups that compute; one more loads and adds dQ to its sum
constexpr int NUM_THREADS = 128 * (CONSUMERS + 1);
constexpr int PRODUCER_WARP = 4 * CONSUMERS;  // starts all loads; the next ones add dQ
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
constexpr bool BY_ROLES = HEAD_DIM > 128;  // the consumers share their keys, not their work
constexpr int BLOCK_N = BY_ROLES ? 64 : 64 * CONSUMERS;  // keys; a warpgroup computes for 64
constexpr int BLOCK_M = 64;                              // queries of a tile
constexpr int NUM_STAGES = 2;  // tiles of Q, of dO and of dS in shared memory
constexpr int PANEL = 64;      // columns of a panel: 128 bytes, the swizzle's width
constexpr int PANELS = (HEAD_DIM + PANEL - 1) / PANEL;
constexpr bool KV_IN_REGISTERS = HEAD_DIM <= 64;
constexpr int DIM = (HEAD_DIM + 15) / 16 * 16;  // in whole products; zeros from HEAD_DIM on

// Of dQ each warpgroup has half of the columns: a panel, or of a single panel 16 or 32 columns. By
// roles, the first one has two panels, and the second one the rest.
constexpr int DQ_COLUMNS = PANELS == 1 ? (DIM / 2 + 15) / 16 * 16 : BY_ROLES ? 2 * PANEL : PANEL;
constexpr int REST_COLUMNS = BY_ROLES ? DIM - DQ_COLUMNS : DQ_COLUMNS;

// Named barriers; 0 is that of __syncthreads. Those of dQ are warpgroup 0's; the others' follow.
constexpr int DS_BARRIER = 1;
constexpr int DQ_FULL_BARRIER = 2;
constexpr int DQ_EMPTY_BARRIER = DQ_FULL_BARRIER + CONSUMERS;
constexpr int P_FULL_BARRIER = DQ_EMPTY_BARRIER + CONSUMERS;

// A tile as TMA writes it: panels, in each of which 8 rows of 128 bytes are swizzled.
template <int ROWS>
using Tile = Element[PANELS][ROWS][PANEL];

// A tile of dQ lies in the order of the accumulators, in which four floats of all threads stand one
// after another for each 8 columns.
constexpr int DQ_TILES = BY_ROLES ? PANELS * PANEL / 8 : CONSUMERS * DQ_COLUMNS / 8;
using DqTile = float[DQ_TILES][128][4];

// What the consumers hand on, in the same order: dQ, to the warps that add it to its sum, or P, two
// numbers in a float, from one consumer to the other.
using Staging = float[BY_ROLES ? BLOCK_M / 16 : DQ_TILES][128][4];

// Of a tile's queries: lse in units of log2, and delta.
struct Rows {
    float lse[BLOCK_M], delta[BLOCK_M];
};

struct alignas(SWIZZLE_128B_TILE) SharedMemory {
    Tile<BLOCK_N> k, v;  // and in the end dK and dV
    Tile<BLOCK_M> q[NUM_STAGES];
    Tile<BLOCK_M> dout[NUM_STAGES];
    Element ds[NUM_STAGES][1][BLOCK_N][BLOCK_M];  // the transpose of dS: one panel
    Staging staging;
    Rows rows[NUM_STAGES];
    Mbarrier k_full, v_full, q_full[NUM_STAGES], dout_full[NUM_STAGES];  // the tile has arrived
    Mbarrier q_empty[NUM_STAGES], dout_empty[NUM_STAGES];  // every consumer warp has read it
};

constexpr int ROW_THREADS = 128 * CONSUMERS;  // of attention_delta and attention_round
constexpr int LANES = 16;                     // threads that share a row of attention_delta
using WarpFloats = float[ROW_THREADS / 32];

template <typename T>
constexpr bool IS_FP16 = false;
template <>
constexpr bool IS_FP16<fp16> = true;

extern "C" {
__constant__ BackwardDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_delta",
                 .grid = {{SEQ_Q, BLOCK_M}, {HEADS, 1}, {BATCH, 1}},
                 .threads = ROW_THREADS,
                 .smem_bytes = sizeof(WarpFloats)},
                {.name = "attention_backward",
                 .grid = {{SEQ_K, BLOCK_N}, {KV_HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS,
                 .smem_bytes = sizeof(SharedMemory)},
                {.name = "attention_round",
                 .grid = {{SEQ_Q, BLOCK_M}, {HEADS, 1}, {BATCH, 1}},
                 .threads = ROW_THREADS,
                 .smem_bytes = sizeof(Tile<BLOCK_M>)}},
    .workspace = {{.element_bytes = sizeof(Rows) / BLOCK_M,
                   .shape = {{BATCH, 1}, {HEADS, 1}, {SEQ_Q, BLOCK_M}}},
                  {.element_bytes = sizeof(DqTile) / BLOCK_M,
                   .shape = {{BATCH, 1}, {HEADS, 1}, {SEQ_Q, BLOCK_M}}},
                  {.element_bytes = IS_FP16<Element> ? sizeof(float) : 0,  // of a tile: max |dO|
                   .shape = {{BATCH, 1}, {HEADS, 1}, {SEQ_Q, 1}}}},
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

// Describes the columns d ... d + 15 of a tile, its rows from `row` on.
template <int ROWS>
__device__ uint64_t k_major(const Tile<ROWS>& tile, int row, int d) {
    return matrix_descriptor<SWIZZLE_128B>(&tile[d / PANEL][row][d % PANEL], 0, SWIZZLE_128B_TILE);
}

// Describes the rows row ... row + 15 of panels, their columns from d on.
template <int N, int ROWS>
__device__ uint64_t mn_major(const Element (&panels)[N][ROWS][PANEL], int row, int d) {
    return matrix_descriptor<SWIZZLE_128B>(&panels[d / PANEL][row][d % PANEL], sizeof(panels[0]),
                                           SWIZZLE_128B_TILE);
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
template <int TILES>
__device__ void write(const TensorMap& map, int first_row, int head, int batch, Tile<BLOCK_N>& tile,
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

// frag = panels[row + r], of a warp's 16 rows, as wgmma's operand A
template <int ROWS, int STEPS>
__device__ void load_rows(uint32_t (&frag)[STEPS][4], Tile<ROWS>& tile, int row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < STEPS; ++j)
        ldmatrix_x4(frag[j], swizzled(tile, row + lane % 16, 16 * j + lane / 16 * 8));
}

// Starts acc = A B^T  [64, BLOCK_M], where A are rows of K or V: those of the tile from `row` on, or
// those that load_rows has put into registers.
__device__ void multiply(float (&acc)[BLOCK_M / 8][4], const Tile<BLOCK_N>& a, int row,
                         const Tile<BLOCK_M>& b) {
    wgmma_fence(acc);
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += 16)
        wgmma_m64nNk16<Element, K_MAJOR, K_MAJOR>(acc, k_major<BLOCK_N>(a, row, d),
                                                  k_major<BLOCK_M>(b, 0, d), d > 0);
    wgmma_commit_group();
}
__device__ void multiply(float (&acc)[BLOCK_M / 8][4], uint32_t (&a)[DIM / 16][4],
                         const Tile<BLOCK_M>& b) {
    wgmma_fence(acc, a);
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += 16)
        wgmma_m64nNk16<Element, K_MAJOR>(acc, a[d / 16], k_major<BLOCK_M>(b, 0, d), d > 0);
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

// Starts dq_acc = dS K, the 8 TILES columns from `column` on.
template <int TILES>
__device__ void multiply_dq(float (&dq_acc)[TILES][4], const Element (&ds)[1][BLOCK_N][BLOCK_M],
                            const Tile<BLOCK_N>& k, int column) {
    wgmma_fence(dq_acc);
#pragma unroll
    for (int j = 0; j < BLOCK_N; j += 16)
        wgmma_m64nNk16<Element, MN_MAJOR, MN_MAJOR>(dq_acc, mn_major(ds, j, 0),
                                                    mn_major(k, j, column), j > 0);
    wgmma_commit_group();
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

// Of each query: lse in units of log2, +inf where no key is visible and past the last query, so that
// P = 2^(S - lse) is 0 there; delta = rowsum(dO * O)  [batch, heads, seq_q in whole tiles]. And dQ = 0.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    attention_delta(const __grid_constant__ BackwardParams p) {
    const int q_tiles = (p.seq_q + BLOCK_M - 1) / BLOCK_M;
    const int head = blockIdx.x / q_tiles % p.heads;
    const int batch = blockIdx.x / q_tiles / p.heads;
    const Element* o = p.o + batch * p.o_stride.batch + head * p.o_stride.head;
    const Element* dout = p.dout + batch * p.dout_stride.batch + head * p.dout_stride.head;
    Rows& rows = static_cast<Rows*>(p.workspace[0])[blockIdx.x];

    float largest = 0.0f;
    for (int r = threadIdx.x / LANES; r < BLOCK_M; r += ROW_THREADS / LANES) {
        const int i = blockIdx.x % q_tiles * BLOCK_M + r;
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
    float* dq = reinterpret_cast<float*>(static_cast<DqTile*>(p.workspace[1])[blockIdx.x]);
    for (int n = 4 * threadIdx.x; n < sizeof(DqTile) / sizeof(float); n += 4 * ROW_THREADS)
        store_float4(&dq[n], make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    if (IS_FP16<Element>) {
        auto& of_warps = shared_memory<WarpFloats>();
        largest = warp_max(largest);
        if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
        __syncthreads();  // every warp's part is there
        for (float of_warp : of_warps) largest = fmaxf(largest, of_warp);
        if (threadIdx.x == 0) static_cast<float*>(p.workspace[2])[blockIdx.x] = largest;
    }
}

// What a block works on: BLOCK_N keys, and the tiles of queries that see them, of each query head of
// the keys' group.
struct Work {
    int k_start, kv_head, batch;
    int first_head, end_head;
    int first_tile, end_tile;

    __device__ explicit Work(const BackwardParams& p) {
        const int k_blocks = (p.seq_k + BLOCK_N - 1) / BLOCK_N, group = p.heads / p.kv_heads;
        k_start = blockIdx.x % k_blocks * BLOCK_N;
        kv_head = blockIdx.x / k_blocks % p.kv_heads;
        batch = blockIdx.x / k_blocks / p.kv_heads;
        first_head = kv_head * group;
        end_head = first_head + group;
        // Causal: key j is seen by the queries i >= j + seq_q - seq_k.
        first_tile = CAUSAL ? max(0, k_start + p.seq_q - p.seq_k) / BLOCK_M : 0;
        end_tile = (p.seq_q + BLOCK_M - 1) / BLOCK_M;
    }

    // Of Rows, and of DqTile.
    __device__ int64_t tile_index(const BackwardParams& p, int head, int tile) const {
        return (int64_t(batch) * p.heads + head) * end_tile + tile;
    }
};

// A stage's barriers complete one phase per tile. Phase -1 counts as completed from the beginning: a
// new stage is empty.
__device__ void wait_for(Mbarrier& barrier, int phase) {
    while (!mbarrier_try_wait_parity(barrier, phase & 1)) {
    }
}

// By all lanes of a warp, which has read a stage, or will not read it.
__device__ void release(Mbarrier& empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
}

// ---- load K and V, and the tiles
__device__ void load(const BackwardParams& p, SharedMemory& smem, const Work& work) {
    for (int head = work.first_head, i = 0; head < work.end_head; ++head)
        for (int tile = work.first_tile; tile < work.end_tile; ++tile, ++i) {
            const int stage = i % NUM_STAGES, q_start = tile * BLOCK_M;
            if (i == 0) {
                mbarrier_arrive_expect_tx(smem.k_full, sizeof(smem.k));
                load_tile(smem.k, p.k_map, work.k_start, work.kv_head, work.batch, smem.k_full);
            }
            wait_for(smem.q_empty[stage], i / NUM_STAGES - 1);
            Mbarrier& q_full = smem.q_full[stage];
            mbarrier_arrive_expect_tx(q_full, sizeof(smem.q[0]) + sizeof(Rows));
            load_tile(smem.q[stage], p.q_map, q_start, head, work.batch, q_full);
            const Rows* rows = static_cast<const Rows*>(p.workspace[0]);
            cp_async_bulk_load(&smem.rows[stage], rows + work.tile_index(p, head, tile),
                               sizeof(Rows), q_full);
            if (i == 0) {
                mbarrier_arrive_expect_tx(smem.v_full, sizeof(smem.v));
                load_tile(smem.v, p.v_map, work.k_start, work.kv_head, work.batch, smem.v_full);
            }
            wait_for(smem.dout_empty[stage], i / NUM_STAGES - 1);
            mbarrier_arrive_expect_tx(smem.dout_full[stage], sizeof(smem.dout[0]));
            load_tile(smem.dout[stage], p.dout_map, q_start, head, work.batch,
                      smem.dout_full[stage]);
        }
}

// ---- dQ joins the sum over all keys: a warp for each warpgroup, whose part it adds
__device__ void add_dq(const BackwardParams& p, SharedMemory& smem, const Work& work,
                       int warpgroup) {
    constexpr int TILES = DQ_COLUMNS / 8;
    for (int head = work.first_head; head < work.end_head; ++head)
        for (int tile = work.first_tile; tile < work.end_tile; ++tile) {
            bar_sync(DQ_FULL_BARRIER + warpgroup, 160);
            if (threadIdx.x % 32 == 0) {
                DqTile& sums = static_cast<DqTile*>(p.workspace[1])[work.tile_index(p, head, tile)];
                cp_reduce_async_bulk_add(sums[TILES * warpgroup][0],
                                         smem.staging[TILES * warpgroup][0],
                                         TILES * sizeof(sums[0]));
                cp_async_bulk_commit_group();
                cp_async_bulk_wait_group_read<0>();
            }
            __syncwarp();
            const bool is_last = head + 1 == work.end_head && tile + 1 == work.end_tile;
            if (!is_last) bar_arrive(DQ_EMPTY_BARRIER + warpgroup, 160);
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
            dp[n][i] = prob[n][i] * (dp[n][i] - delta) * factor;
        }
}

// head_dim up to 128: all five products of the warpgroup's 64 keys
__device__ void compute(const BackwardParams& p, SharedMemory& smem, const Work& work, int warp,
                        float factor) {
    const int warpgroup = warp / 4;
    const int group_row = 64 * warpgroup;  // the warpgroup's first key in the block
    const int warp_row = 16 * warp;        // and the warp's
    const int first_key = work.k_start + warp_row;
    const float unscale = 1.0f / factor;
    float dk_acc[DIM / 8][4] = {}, dv_acc[DIM / 8][4] = {};
    uint32_t k_frag[DIM / 16][4], v_frag[DIM / 16][4];  // [16, 16] each, of the warp's keys
    wait_for(smem.k_full, 0);
    if (KV_IN_REGISTERS) load_rows(k_frag, smem.k, warp_row);

    // ---- for each Q/dO tile of each head of the group
    for (int head = work.first_head, i = 0; head < work.end_head; ++head)
        for (int tile = work.first_tile; tile < work.end_tile; ++tile, ++i) {
            const int stage = i % NUM_STAGES;

            // ---- S^T = K Q^T, dP^T = V dO^T  [BLOCK_N, BLOCK_M], [64, BLOCK_M] in each warpgroup
            float s_acc[BLOCK_M / 8][4], dp_acc[BLOCK_M / 8][4];
            wait_for(smem.q_full[stage], i / NUM_STAGES);
            if (KV_IN_REGISTERS)
                multiply(s_acc, k_frag, smem.q[stage]);
            else
                multiply(s_acc, smem.k, group_row, smem.q[stage]);
            if (i == 0) {
                wait_for(smem.v_full, 0);
                if (KV_IN_REGISTERS) load_rows(v_frag, smem.v, warp_row);
            }
            wait_for(smem.dout_full[stage], i / NUM_STAGES);
            if (KV_IN_REGISTERS)
                multiply(dp_acc, v_frag, smem.dout[stage]);
            else
                multiply(dp_acc, smem.v, group_row, smem.dout[stage]);

            // ---- P = 2^(S - lse), dS = P * (dP - delta)
            uint32_t p_frag[BLOCK_M / 16][4], ds_frag[BLOCK_M / 16][4];
            wgmma_wait_group<1>(s_acc);
            exponentials(s_acc, p, smem.rows[stage], first_key, tile * BLOCK_M);
            convert(p_frag, s_acc);
            wgmma_wait_group<0>(dp_acc);
            scores_gradient(dp_acc, s_acc, smem.rows[stage], factor);
            convert(ds_frag, dp_acc);
            store_rows(smem.ds[stage], warp_row, 0, ds_frag);

            // ---- dV += P^T dO  [BLOCK_N, HEAD_DIM], [64, DIM] in each warpgroup
            multiply_add(dv_acc, p_frag, smem.dout[stage]);

            // ---- dQ = dS K of these keys  [BLOCK_M, HEAD_DIM], [64, DQ_COLUMNS] in each warpgroup
            fence_proxy_async();                    // by each writer of dS
            bar_sync(DS_BARRIER, 128 * CONSUMERS);  // dS is complete
            float dq_acc[DQ_COLUMNS / 8][4];
            multiply_dq(dq_acc, smem.ds[stage], smem.k, DQ_COLUMNS * warpgroup);
            wgmma_wait_group<1>(dv_acc, p_frag);
            release(smem.dout_empty[stage]);

            // ---- dK += dS^T Q  [BLOCK_N, HEAD_DIM], [64, DIM] in each warpgroup
            multiply_add(dk_acc, ds_frag, smem.q[stage]);
            wgmma_wait_group<1>(dq_acc);
            if (i > 0) bar_sync(DQ_EMPTY_BARRIER + warpgroup, 160);  // dQ's place is free
#pragma unroll
            for (int n = 0; n < DQ_COLUMNS / 8; ++n) {
                const float* x = dq_acc[n];
                store_float4(
                    smem.staging[DQ_COLUMNS / 8 * warpgroup + n][threadIdx.x % 128],
                    make_float4(x[0] * unscale, x[1] * unscale, x[2] * unscale, x[3] * unscale));
            }
            fence_proxy_async();                           // by each writer of dQ
            bar_arrive(DQ_FULL_BARRIER + warpgroup, 160);  // dQ is complete
            wgmma_wait_group<0>(dk_acc, ds_frag);
            release(smem.q_empty[stage]);
        }

    // ---- write dK and dV, in the places of K and V
    bar_sync(DS_BARRIER, 128 * CONSUMERS);  // all products have read K
    write(p.dk_map, first_key, work.kv_head, work.batch, smem.k, warp_row, dk_acc,
          p.softmax_scale * unscale);
    write(p.dv_map, first_key, work.kv_head, work.batch, smem.v, warp_row, dv_acc, 1.0f);
    if (threadIdx.x % 32 == 0) cp_async_bulk_wait_group_read<0>();
}

// The 8 TILES columns of dQ from `column` on join the sum over all keys, from registers: beside the
// tiles of a large head_dim there is no place for dQ in shared memory.
template <int TILES>
__device__ void add_from_registers(DqTile& sums, int column, const float (&dq_acc)[TILES][4],
                                   float unscale) {
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        const float* x = dq_acc[n];
        red_add_v4(sums[column / 8 + n][threadIdx.x % 128],
                   make_float4(x[0] * unscale, x[1] * unscale, x[2] * unscale, x[3] * unscale));
    }
}

// head_dim over 128, the first consumer: P, dV and the first columns of dQ, for all keys
__device__ void compute_dv(const BackwardParams& p, SharedMemory& smem, const Work& work, int warp,
                           float unscale) {
    const int warp_row = 16 * warp;
    const int first_key = work.k_start + warp_row;
    float dv_acc[DIM / 8][4] = {};
    wait_for(smem.k_full, 0);

    for (int head = work.first_head, i = 0; head < work.end_head; ++head)
        for (int tile = work.first_tile; tile < work.end_tile; ++tile, ++i) {
            const int stage = i % NUM_STAGES;

            // ---- S^T = K Q^T  [BLOCK_N, BLOCK_M]
            float s_acc[BLOCK_M / 8][4];
            wait_for(smem.q_full[stage], i / NUM_STAGES);
            multiply(s_acc, smem.k, 0, smem.q[stage]);
            wgmma_wait_group<0>(s_acc);

            // ---- P = 2^(S - lse), to the other consumer
            uint32_t p_frag[BLOCK_M / 16][4];
            exponentials(s_acc, p, smem.rows[stage], first_key, tile * BLOCK_M);
            release(smem.q_empty[stage]);
            convert(p_frag, s_acc);
#pragma unroll
            for (int j = 0; j < BLOCK_M / 16; ++j) {
                const uint32_t* x = p_frag[j];
                store_float4(smem.staging[j][threadIdx.x],
                             make_float4(__int_as_float(x[0]), __int_as_float(x[1]),
                                         __int_as_float(x[2]), __int_as_float(x[3])));
            }
            bar_arrive(P_FULL_BARRIER, 128 * CONSUMERS);  // P is complete

            // ---- dV += P^T dO  [BLOCK_N, HEAD_DIM]
            wait_for(smem.dout_full[stage], i / NUM_STAGES);
            multiply_add(dv_acc, p_frag, smem.dout[stage]);

            // ---- dQ = dS K of these keys  [BLOCK_M, DQ_COLUMNS]
            bar_sync(DS_BARRIER, 128 * CONSUMERS);  // dS is complete, and P has been read
            float dq_acc[DQ_COLUMNS / 8][4];
            multiply_dq(dq_acc, smem.ds[stage], smem.k, 0);
            wgmma_wait_group<1>(dv_acc, p_frag);
            release(smem.dout_empty[stage]);
            wgmma_wait_group<0>(dq_acc);
            DqTile* sums = static_cast<DqTile*>(p.workspace[1]);
            add_from_registers(sums[work.tile_index(p, head, tile)], 0, dq_acc, unscale);
        }

    // ---- write dV, in the place of V
    bar_sync(DS_BARRIER, 128 * CONSUMERS);  // all products have read K and V
    write(p.dv_map, first_key, work.kv_head, work.batch, smem.v, warp_row, dv_acc, 1.0f);
    if (threadIdx.x % 32 == 0) cp_async_bulk_wait_group_read<0>();
}

// head_dim over 128, the second consumer: dS, dK and the other columns of dQ, for all keys
__device__ void compute_dk(const BackwardParams& p, SharedMemory& smem, const Work& work, int warp,
                           float factor) {
    const int warp_row = 16 * (warp - 4);
    const int first_key = work.k_start + warp_row;
    const float unscale = 1.0f / factor;
    float dk_acc[DIM / 8][4] = {};
    wait_for(smem.k_full, 0);
    wait_for(smem.v_full, 0);

    for (int head = work.first_head, i = 0; head < work.end_head; ++head)
        for (int tile = work.first_tile; tile < work.end_tile; ++tile, ++i) {
            const int stage = i % NUM_STAGES;

            // ---- dP^T = V dO^T  [BLOCK_N, BLOCK_M]
            float dp_acc[BLOCK_M / 8][4], prob[BLOCK_M / 8][4];
            wait_for(smem.dout_full[stage], i / NUM_STAGES);
            multiply(dp_acc, smem.v, 0, smem.dout[stage]);
            wgmma_wait_group<0>(dp_acc);
            release(smem.dout_empty[stage]);

            // ---- dS = P * (dP - delta), with the other consumer's P
            uint32_t ds_frag[BLOCK_M / 16][4];
            wait_for(smem.q_full[stage], i / NUM_STAGES);
            bar_sync(P_FULL_BARRIER, 128 * CONSUMERS);  // P is complete
#pragma unroll
            for (int j = 0; j < BLOCK_M / 16; ++j) {
                float x[VEC];
                load_vector(x,
                            reinterpret_cast<const Element*>(smem.staging[j][threadIdx.x - 128]));
#pragma unroll
                for (int n = 0; n < VEC; ++n) prob[2 * j + n / 4][n % 4] = x[n];
            }
            scores_gradient(dp_acc, prob, smem.rows[stage], factor);
            convert(ds_frag, dp_acc);
            store_rows(smem.ds[stage], warp_row, 0, ds_frag);

            // ---- dQ = dS K of these keys  [BLOCK_M, REST_COLUMNS]
            fence_proxy_async();                    // by each writer of dS
            bar_sync(DS_BARRIER, 128 * CONSUMERS);  // dS is complete, and P has been read
            float dq_acc[REST_COLUMNS / 8][4];
            multiply_dq(dq_acc, smem.ds[stage], smem.k, DQ_COLUMNS);

            // ---- dK += dS^T Q  [BLOCK_N, HEAD_DIM]
            multiply_add(dk_acc, ds_frag, smem.q[stage]);
            wgmma_wait_group<1>(dq_acc);
            DqTile* sums = static_cast<DqTile*>(p.workspace[1]);
            add_from_registers(sums[work.tile_index(p, head, tile)], DQ_COLUMNS, dq_acc, unscale);
            wgmma_wait_group<0>(dk_acc, ds_frag);
            release(smem.q_empty[stage]);
        }

    // ---- write dK, in the place of K
    bar_sync(DS_BARRIER, 128 * CONSUMERS);  // all products have read K and V
    write(p.dk_map, first_key, work.kv_head, work.batch, smem.k, warp_row, dk_acc,
          p.softmax_scale * unscale);
    if (threadIdx.x % 32 == 0) cp_async_bulk_wait_group_read<0>();
}

// dK = scale dS^T Q, dV = P^T dO, summed over the query heads of a group
// [batch, kv_heads, seq_k, HEAD_DIM]; dQ += dS K  [batch, heads, seq_q, HEAD_DIM]
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_backward(const __grid_constant__ BackwardParams p) {
    SharedMemory& smem = shared_memory<SharedMemory>();
    const Work work(p);
    // Uniform across the warp; the shuffle tells the compiler so.
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);

    if (threadIdx.x == 0) {
        mbarrier_init(smem.k_full, 1);
        mbarrier_init(smem.v_full, 1);
#pragma unroll
        for (int stage = 0; stage < NUM_STAGES; ++stage) {
            mbarrier_init(smem.q_full[stage], 1);
            mbarrier_init(smem.dout_full[stage], 1);
            mbarrier_init(smem.q_empty[stage], 4 * CONSUMERS);
            mbarrier_init(smem.dout_empty[stage], 4 * CONSUMERS);
        }
        fence_mbarrier_init();
    }
    const float* largest = static_cast<const float*>(p.workspace[2]);
    const float factor = ds_factor(largest + work.tile_index(p, work.first_head, 0),
                                   (work.end_head - work.first_head) * work.end_tile);
    __syncthreads();  // the mbarriers are initialized

    if (warp >= PRODUCER_WARP) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == PRODUCER_WARP) {
            if (threadIdx.x % 32 == 0) load(p, smem, work);
        } else if (!BY_ROLES && warp <= PRODUCER_WARP + CONSUMERS) {
            add_dq(p, smem, work, warp - PRODUCER_WARP - 1);
        }
        return;
    }
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    if (!BY_ROLES)
        compute(p, smem, work, warp, factor);
    else if (warp < 4)
        compute_dv(p, smem, work, warp, 1.0f / factor);
    else
        compute_dk(p, smem, work, warp, factor);
}

// dQ in its order and type  [batch, heads, seq_q, HEAD_DIM]
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    attention_round(const __grid_constant__ BackwardParams p) {
    Tile<BLOCK_M>& tile = shared_memory<Tile<BLOCK_M>>();
    const int q_tiles = (p.seq_q + BLOCK_M - 1) / BLOCK_M;
    const int q_start = blockIdx.x % q_tiles * BLOCK_M;
    const int head = blockIdx.x / q_tiles % p.heads;
    const int batch = blockIdx.x / q_tiles / p.heads;
    const int warpgroup = threadIdx.x / 128;
    const DqTile& sums = static_cast<const DqTile*>(p.workspace[1])[blockIdx.x];

    constexpr int COLUMNS =
        DQ_COLUMNS < PANEL ? DQ_COLUMNS : PANEL;  // which a warpgroup writes at once
    for (int column = COLUMNS * warpgroup; column < 8 * DQ_TILES; column += CONSUMERS * COLUMNS) {
        float dq_acc[COLUMNS / 8][4];
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n) {
            const float4 x = load_float4(sums[column / 8 + n][threadIdx.x % 128]);
            const float scaled[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) dq_acc[n][i] = p.softmax_scale * scaled[i];
        }
        uint32_t dq_frag[COLUMNS / 16][4];
        convert(dq_frag, dq_acc);
        store_rows(tile, threadIdx.x % 128 / 32 * 16, column, dq_frag);
    }
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
