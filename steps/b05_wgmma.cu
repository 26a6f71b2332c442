// b05 -- wgmma and TMA: P^T and dS^T stay in registers
// change: all five products by wgmma, each warpgroup with 64 keys: its accumulators of P^T and dS^T
//     are operand A of dV and dK, and only dS goes through shared memory, for dQ; tensor maps and
//     mbarriers instead of cp.async; a tile of dQ is added to global memory by one bulk reduction
// why: b04 reads each operand from shared memory once for 32 rows, and P and dS more often; mma.sync
//     reaches 62 % of the tensor cores' peak. wgmma reads an operand once for 64 rows, and reaches
//     the peak, but here nothing else runs meanwhile: 1.5 times b04
// limits: bf16, fp16; head_dim 8-128 by 8; sm_90a
//     needs 4 bytes of workspace for each element of dQ
// repeats: all bits but dq's; blocks add to it in any order
#include "backward.cuh"
#include "bulk.cuh"
#include "mma.cuh"
#include "wgmma.cuh"

constexpr int NUM_WARPGROUPS = 2;
constexpr int NUM_THREADS = 128 * NUM_WARPGROUPS;
constexpr int BLOCK_N = 64 * NUM_WARPGROUPS;  // keys, 64 a warpgroup
constexpr int BLOCK_M = 64;                   // queries of a tile
constexpr int NUM_STAGES = 2;                 // tiles in shared memory: one in use, one in flight
constexpr int PANEL = 64;                     // columns of a panel: 128 bytes, the swizzle's width
constexpr int PANELS = (HEAD_DIM + PANEL - 1) / PANEL;
constexpr int DIM = (HEAD_DIM + 15) / 16 * 16;  // in whole products; zeros from HEAD_DIM on

// Of dQ each warpgroup has half of the columns: a panel, or of a single panel 16 or 32 columns.
constexpr int DQ_COLUMNS = PANELS == 1 ? (DIM / 2 + 15) / 16 * 16 : PANEL;

// A tile as TMA writes it: panels, in each of which 8 rows of 128 bytes are swizzled.
template <int ROWS>
using Tile = Element[PANELS][ROWS][PANEL];

// A tile of dQ lies in the order of the accumulators: four floats of all threads after another.
using DqTile = float[NUM_WARPGROUPS][DQ_COLUMNS / 8][128][4];

// Of a tile's queries: lse in units of log2, and delta.
struct Rows {
    float lse[BLOCK_M], delta[BLOCK_M];
};

struct alignas(SWIZZLE_128B_TILE) SharedMemory {
    Tile<BLOCK_N> k, v;  // and in the end dK and dV
    Tile<BLOCK_M> q[NUM_STAGES];
    Tile<BLOCK_M> dout[NUM_STAGES];
    Element ds[1][BLOCK_N][BLOCK_M];  // the transpose of dS: one panel
    DqTile dq;
    Rows rows[NUM_STAGES];
    Mbarrier k_full, v_full, q_full[NUM_STAGES], dout_full[NUM_STAGES];  // the tile has arrived
};

constexpr int ROW_THREADS = 128 * NUM_WARPGROUPS;  // of attention_delta and attention_round
constexpr int LANES = 16;                          // threads that share a row of attention_delta
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

// dK = scale dS^T Q, dV = P^T dO, summed over the query heads of a group
// [batch, kv_heads, seq_k, HEAD_DIM]; dQ += dS K  [batch, heads, seq_q, HEAD_DIM]
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_backward(const __grid_constant__ BackwardParams p) {
    SharedMemory& smem = shared_memory<SharedMemory>();
    const int k_blocks = (p.seq_k + BLOCK_N - 1) / BLOCK_N;
    const int k_start = blockIdx.x % k_blocks * BLOCK_N;
    const int kv_head = blockIdx.x / k_blocks % p.kv_heads;
    const int batch = blockIdx.x / k_blocks / p.kv_heads;
    const int group = p.heads / p.kv_heads;
    const int warpgroup = threadIdx.x / 128;
    const int group_row = 64 * warpgroup;        // the warpgroup's first key in the block
    const int warp_row = threadIdx.x / 32 * 16;  // and the warp's
    const int lane = threadIdx.x % 32;
    // Causal: key j is seen by the queries i >= j - offset.
    const int offset = p.seq_k - p.seq_q;
    const int q_tiles = (p.seq_q + BLOCK_M - 1) / BLOCK_M;
    const int first_tile = CAUSAL ? max(0, k_start - offset) / BLOCK_M : 0;
    const int head_tiles = q_tiles - first_tile;  // of each head of the group
    const int num_tiles = group * head_tiles;
    const auto head_of = [&](int i) { return kv_head * group + i / head_tiles; };
    const auto start_of = [&](int i) { return (first_tile + i % head_tiles) * BLOCK_M; };
    const auto tile_index = [&](int head, int q_start) {  // of Rows and DqTile
        return (int64_t(batch) * p.heads + head) * q_tiles + q_start / BLOCK_M;
    };

    const auto load_q_dout = [&](int i) {
        const int stage = i % NUM_STAGES, head = head_of(i), q_start = start_of(i);
        Mbarrier& q_full = smem.q_full[stage];
        mbarrier_arrive_expect_tx(q_full, sizeof(smem.q[0]) + sizeof(Rows));
        load_tile(smem.q[stage], p.q_map, q_start, head, batch, q_full);
        cp_async_bulk_load(&smem.rows[stage],
                           static_cast<const Rows*>(p.workspace[0]) + tile_index(head, q_start),
                           sizeof(Rows), q_full);
        mbarrier_arrive_expect_tx(smem.dout_full[stage], sizeof(smem.dout[0]));
        load_tile(smem.dout[stage], p.dout_map, q_start, head, batch, smem.dout_full[stage]);
    };
    // A stage's barriers complete one phase per tile.
    const auto wait_for = [](Mbarrier& barrier, int phase) {
        while (!mbarrier_try_wait_parity(barrier, phase & 1)) {
        }
    };

    // ---- load K and V, and the first tiles
    if (threadIdx.x == 0) {
        mbarrier_init(smem.k_full, 1);
        mbarrier_init(smem.v_full, 1);
#pragma unroll
        for (int stage = 0; stage < NUM_STAGES; ++stage) {
            mbarrier_init(smem.q_full[stage], 1);
            mbarrier_init(smem.dout_full[stage], 1);
        }
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(smem.k_full, sizeof(smem.k));
        load_tile(smem.k, p.k_map, k_start, kv_head, batch, smem.k_full);
        mbarrier_arrive_expect_tx(smem.v_full, sizeof(smem.v));
        load_tile(smem.v, p.v_map, k_start, kv_head, batch, smem.v_full);
        for (int i = 0; i < min(NUM_STAGES, num_tiles); ++i) load_q_dout(i);
    }
    const float scale_log2 = p.softmax_scale * LOG2_E;
    const float factor =
        ds_factor(static_cast<const float*>(p.workspace[2]) + tile_index(kv_head * group, 0),
                  group * q_tiles);
    const float unscale = 1.0f / factor;
    __syncthreads();  // the mbarriers are initialized
    wait_for(smem.k_full, 0);
    wait_for(smem.v_full, 0);

    // A lane's s_acc[n][2 r + i], with r and i 0 or 1, is the element of S^T in row 8 r + lane / 4 of
    // its warp's 16 and column 8 n + 2 (lane % 4) + i; so are the others.
    float dk_acc[DIM / 8][4] = {}, dv_acc[DIM / 8][4] = {};

    // ---- for each Q/dO tile of each head of the group
    for (int i = 0; i < num_tiles; ++i) {
        const int stage = i % NUM_STAGES;
        const int q_start = start_of(i);

        // ---- S^T = K Q^T, dP^T = V dO^T  [BLOCK_N, BLOCK_M], [64, BLOCK_M] in each warpgroup
        float s_acc[BLOCK_M / 8][4], dp_acc[BLOCK_M / 8][4];
        wait_for(smem.q_full[stage], i / NUM_STAGES);
        wgmma_fence(s_acc);
#pragma unroll
        for (int d = 0; d < HEAD_DIM; d += 16)
            wgmma_m64nNk16<Element, K_MAJOR, K_MAJOR>(s_acc, k_major<BLOCK_N>(smem.k, group_row, d),
                                                      k_major<BLOCK_M>(smem.q[stage], 0, d), d > 0);
        wgmma_commit_group();
        wait_for(smem.dout_full[stage], i / NUM_STAGES);
        wgmma_fence(dp_acc);
#pragma unroll
        for (int d = 0; d < HEAD_DIM; d += 16)
            wgmma_m64nNk16<Element, K_MAJOR, K_MAJOR>(
                dp_acc, k_major<BLOCK_N>(smem.v, group_row, d),
                k_major<BLOCK_M>(smem.dout[stage], 0, d), d > 0);
        wgmma_commit_group();

        // ---- P = 2^(S - lse), dS = P * (dP - delta)
        const Rows& rows = smem.rows[stage];
        uint32_t p_frag[BLOCK_M / 16][4], ds_frag[BLOCK_M / 16][4];
        wgmma_wait_group<1>(s_acc);
#pragma unroll
        for (int n = 0; n < BLOCK_M / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& s = s_acc[n][i];
                s = ex2_approx_ftz(s * scale_log2 - rows.lse[8 * n + 2 * (lane % 4) + i % 2]);
            }
        // A key past the last one is no row of dK and dV, but it would add to dQ.
        const int tile_keys = CAUSAL ? min(p.seq_k, q_start + offset + 1) : p.seq_k;
        if (k_start + warp_row + 16 > tile_keys) {
#pragma unroll
            for (int n = 0; n < BLOCK_M / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int key = k_start + warp_row + 8 * (i / 2) + lane / 4;
                    const int row = q_start + 8 * n + 2 * (lane % 4) + i % 2;
                    if (key >= (CAUSAL ? min(p.seq_k, row + offset + 1) : p.seq_k))
                        s_acc[n][i] = 0.0f;
                }
        }
        convert(p_frag, s_acc);
        wgmma_wait_group<0>(dp_acc);
#pragma unroll
        for (int n = 0; n < BLOCK_M / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& dp = dp_acc[n][i];
                dp = s_acc[n][i] * (dp - rows.delta[8 * n + 2 * (lane % 4) + i % 2]) * factor;
            }
        convert(ds_frag, dp_acc);
        store_rows(smem.ds, warp_row, 0, ds_frag);
        fence_proxy_async();                                       // by each writer
        if (threadIdx.x == 0) cp_async_bulk_wait_group_read<0>();  // of the tile before
        __syncthreads();  // dS is complete, and dQ's place free

        // ---- dV += P^T dO, dK += dS^T Q  [BLOCK_N, HEAD_DIM], [64, DIM] in each warpgroup
        float dq_acc[DQ_COLUMNS / 8][4];
        wgmma_fence(dv_acc, dk_acc, dq_acc, p_frag, ds_frag);
#pragma unroll
        for (int j = 0; j < BLOCK_M; j += 16)
            wgmma_m64nNk16<Element, MN_MAJOR>(dv_acc, p_frag[j / 16],
                                              mn_major(smem.dout[stage], j, 0), true);
#pragma unroll
        for (int j = 0; j < BLOCK_M; j += 16)
            wgmma_m64nNk16<Element, MN_MAJOR>(dk_acc, ds_frag[j / 16],
                                              mn_major(smem.q[stage], j, 0), true);

        // ---- dQ = dS K of these keys  [BLOCK_M, HEAD_DIM], [64, DQ_COLUMNS] in each warpgroup
#pragma unroll
        for (int j = 0; j < BLOCK_N; j += 16)
            wgmma_m64nNk16<Element, MN_MAJOR, MN_MAJOR>(dq_acc, mn_major(smem.ds, j, 0),
                                                        mn_major(smem.k, j, DQ_COLUMNS * warpgroup),
                                                        j > 0);
        wgmma_commit_group();
        wgmma_wait_group<0>(dv_acc, dk_acc, dq_acc, p_frag, ds_frag);

        // ---- dQ joins the sum over all keys
#pragma unroll
        for (int n = 0; n < DQ_COLUMNS / 8; ++n) {
            const float* x = dq_acc[n];
            store_float4(
                smem.dq[warpgroup][n][threadIdx.x % 128],
                make_float4(x[0] * unscale, x[1] * unscale, x[2] * unscale, x[3] * unscale));
        }
        fence_proxy_async();  // by each writer
        __syncthreads();      // dQ is complete, and everyone has read the tile
        if (threadIdx.x == 0) {
            DqTile* sums = static_cast<DqTile*>(p.workspace[1]) + tile_index(head_of(i), q_start);
            cp_reduce_async_bulk_add((*sums)[0][0][0], smem.dq[0][0][0], sizeof(DqTile));
            cp_async_bulk_commit_group();
            if (i + NUM_STAGES < num_tiles) load_q_dout(i + NUM_STAGES);
        }
    }

    // ---- write dK and dV, in the places of K and V, which the last tile's products have read
    const int first_row = k_start + warp_row;
    write(p.dk_map, first_row, kv_head, batch, smem.k, warp_row, dk_acc, p.softmax_scale * unscale);
    write(p.dv_map, first_row, kv_head, batch, smem.v, warp_row, dv_acc, 1.0f);
    if (lane == 0) cp_async_bulk_wait_group_read<0>();
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

    float dq_acc[DQ_COLUMNS / 8][4];
#pragma unroll
    for (int n = 0; n < DQ_COLUMNS / 8; ++n) {
        const float4 x = load_float4(sums[warpgroup][n][threadIdx.x % 128]);
        const float scaled[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) dq_acc[n][i] = p.softmax_scale * scaled[i];
    }
    uint32_t dq_frag[DQ_COLUMNS / 16][4];
    convert(dq_frag, dq_acc);
    store_rows(tile, threadIdx.x % 128 / 32 * 16, DQ_COLUMNS * warpgroup, dq_frag);
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
