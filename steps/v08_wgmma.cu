// v08 -- wgmma and TMA: four warps together multiply from shared memory, one thread copies tiles
// change: S = Q K^T and O += P V by wgmma, which reads Q, K and V from shared memory by descriptors,
//     so that ldmatrix is gone; tensor maps and mbarriers instead of cp.async; 128 keys a tile; O
//     leaves through shared memory
// why: v07 is limited by mma.sync, which reaches 62 % of the tensor cores' peak, and by ldmatrix
//     between the products; wgmma reaches the peak and reads an operand once for four warps: 1.4
//     times v07
// limits: bf16, fp16; head_dim 8-256 by 8; sm_90a
#include "mma.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int NUM_WARPGROUPS = 2;
constexpr int NUM_THREADS = 128 * NUM_WARPGROUPS;
constexpr int BLOCK_M = 64 * NUM_WARPGROUPS;         // query rows, 64 a warpgroup
constexpr int BLOCK_N = HEAD_DIM <= 128 ? 128 : 64;  // keys of a tile
constexpr int NUM_STAGES = 2;  // tiles in shared memory: one in use, one in flight
constexpr int PANEL = 64;      // columns of a panel: 128 bytes a row, the swizzle's width
constexpr int PANELS = (HEAD_DIM + PANEL - 1) / PANEL;
constexpr int DIM = (HEAD_DIM + 15) / 16 * 16;  // in whole products; zeros from HEAD_DIM on

// A tile as TMA writes it: panels, in each of which 8 rows of 128 bytes are swizzled.
template <int ROWS>
using Tile = Element[PANELS][ROWS][PANEL];

struct alignas(SWIZZLE_128B_TILE) SharedMemory {
    Tile<BLOCK_M> q;  // and in the end O
    Tile<BLOCK_N> k[NUM_STAGES];
    Tile<BLOCK_N> v[NUM_STAGES];
    Mbarrier q_full, k_full[NUM_STAGES], v_full[NUM_STAGES];  // the tile has arrived
};

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_forward",
                 .grid = {{SEQ_Q, BLOCK_M}, {HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS,
                 .smem_bytes = sizeof(SharedMemory)}},
    .q_box = {BLOCK_M, PANEL, SWIZZLE_128B},
    .k_box = {BLOCK_N, PANEL, SWIZZLE_128B},
    .v_box = {BLOCK_N, PANEL, SWIZZLE_128B},
    .o_box = {16, PANEL, SWIZZLE_128B},
};
}

// Starts tile[panel][r][col] = tensor[row + r][PANEL panel + col], zeros past its ends, and
// announces its bytes to the barrier. Called by one thread.
template <int ROWS>
__device__ void load_tile(Tile<ROWS>& tile, const TensorMap& map, int row, int head, int batch,
                          Mbarrier& full) {
    mbarrier_arrive_expect_tx(full, sizeof(tile));
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
        cp_async_bulk_tensor_load(tile[panel][0], map, PANEL * panel, row, head, batch, full);
}

// Describes the columns d ... d + 15 of a tile, its rows from `row` on: Q or K.
template <int ROWS>
__device__ uint64_t k_major(const Tile<ROWS>& tile, int row, int d) {
    return matrix_descriptor<SWIZZLE_128B>(&tile[d / PANEL][row][d % PANEL], 0, SWIZZLE_128B_TILE);
}

// Describes the rows key ... key + 15 of a tile, all columns: V.
template <int ROWS>
__device__ uint64_t mn_major(const Tile<ROWS>& tile, int key) {
    return matrix_descriptor<SWIZZLE_128B>(&tile[0][key][0], sizeof(tile[0]), SWIZZLE_128B_TILE);
}

// Where TMA puts a tile's 8 elements from column d on: the 8 chunks of a row are permuted.
template <int ROWS>
__device__ Element* swizzled(Tile<ROWS>& tile, int row, int d) {
    return &tile[d / PANEL][row][d % PANEL ^ row % 8 * VEC];
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_forward(const __grid_constant__ AttentionParams p) {
    SharedMemory& smem = shared_memory<SharedMemory>();
    const int q_blocks = (p.seq_q + BLOCK_M - 1) / BLOCK_M;
    const int q_start = blockIdx.x % q_blocks * BLOCK_M;
    const int head = blockIdx.x / q_blocks % p.heads;
    const int batch = blockIdx.x / q_blocks / p.heads;
    const int kv_head = head / (p.heads / p.kv_heads);
    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * 16;    // the warp's first row in the block
    const int group_row = threadIdx.x / 128 * 64;  // and the warpgroup's
    // Causal: query i sees the keys j <= i + offset, so the last query sees the last key.
    const int offset = p.seq_k - p.seq_q;
    const int block_keys = CAUSAL ? min(p.seq_k, q_start + BLOCK_M + offset) : p.seq_k;
    const int num_tiles = max(0, (block_keys + BLOCK_N - 1) / BLOCK_N);

    const auto load_kv = [&](int tile) {
        const int stage = tile % NUM_STAGES;
        load_tile(smem.k[stage], p.k_map, tile * BLOCK_N, kv_head, batch, smem.k_full[stage]);
        load_tile(smem.v[stage], p.v_map, tile * BLOCK_N, kv_head, batch, smem.v_full[stage]);
    };
    // A stage's barriers complete one phase per tile.
    const auto wait_for = [](Mbarrier& barrier, int phase) {
        while (!mbarrier_try_wait_parity(barrier, phase & 1)) {
        }
    };

    // ---- load Q, and the first tiles
    if (threadIdx.x == 0) {
        mbarrier_init(smem.q_full, 1);
#pragma unroll
        for (int stage = 0; stage < NUM_STAGES; ++stage) {
            mbarrier_init(smem.k_full[stage], 1);
            mbarrier_init(smem.v_full[stage], 1);
        }
        fence_mbarrier_init();
        load_tile(smem.q, p.q_map, q_start, head, batch, smem.q_full);
        for (int tile = 0; tile < min(NUM_STAGES, num_tiles); ++tile) load_kv(tile);
    }
    __syncthreads();  // the mbarriers are initialized
    wait_for(smem.q_full, 0);

    // exp(scale s) = 2^(scale_log2 s): the hardware's exponential has base 2.
    const float scale_log2 = p.softmax_scale * LOG2_E;
    // A lane's s_acc[n][2 r + i] and o_acc[n][2 r + i], with r and i 0 or 1, are the elements of S
    // and O in row 8 r + lane / 4 of its warp's 16 and column 8 n + 2 (lane % 4) + i.
    float o_acc[DIM / 8][4] = {};
    float row_max[2] = {-INFINITY, -INFINITY};  // m, in units of log2
    float row_sum[2] = {};                      // this lane's share of l

    // ---- for each K/V tile
    for (int tile = 0; tile < num_tiles; ++tile) {
        const int stage = tile % NUM_STAGES;
        const int k_start = tile * BLOCK_N;

        // ---- S = Q K^T  [BLOCK_M, BLOCK_N], [64, BLOCK_N] of it in each warpgroup
        float s_acc[BLOCK_N / 8][4];
        wait_for(smem.k_full[stage], tile / NUM_STAGES);
        wgmma_fence(s_acc);
#pragma unroll
        for (int d = 0; d < HEAD_DIM; d += 16)
            wgmma_m64nNk16<Element, K_MAJOR, K_MAJOR>(s_acc, k_major<BLOCK_M>(smem.q, group_row, d),
                                                      k_major<BLOCK_N>(smem.k[stage], 0, d), d > 0);
        wgmma_commit_group();
        wgmma_wait_group<0>(s_acc);

        // ---- online softmax: m' = max(m, max S), alpha = 2^(m - m')
        // Where no row of the warp has a hidden key, the scale becomes part of the exponential's
        // multiply-add; with a negative one the largest S is not the largest logit. All of a row's P
        // then share the rounding error of scale * max, which cancels (for logits up to 2^27).
        float tile_scale = scale_log2;
        const int warp_row_keys = CAUSAL ? min(p.seq_k, q_start + warp_row + offset + 1) : p.seq_k;
        if (k_start + BLOCK_N > warp_row_keys || scale_log2 < 0.0f) {
            tile_scale = 1.0f;
#pragma unroll
            for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = q_start + warp_row + 8 * (i / 2) + lane / 4;
                    const int row_keys = CAUSAL ? min(p.seq_k, row + offset + 1) : p.seq_k;
                    const int key = k_start + 8 * n + 2 * (lane % 4) + i % 2;
                    float& s = s_acc[n][i];
                    s = key < row_keys ? s * scale_log2 : -INFINITY;
                }
        }
        float shift[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float tile_max = -INFINITY;
#pragma unroll
            for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) tile_max = fmaxf(tile_max, s_acc[n][2 * r + i]);
            tile_max = quad_max(tile_max);
            const float row_max_new = fmaxf(row_max[r], tile_max * tile_scale);
            // Before the first visible key m' = -inf; 2^(s - 0) = 0 there, 2^(-inf + inf) is NaN.
            shift[r] = row_max_new == -INFINITY ? 0.0f : row_max_new;
            const float rescale = ex2_approx_ftz(row_max[r] - shift[r]);
            row_max[r] = row_max_new;
            row_sum[r] *= rescale;
#pragma unroll
            for (int n = 0; n < DIM / 8; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) o_acc[n][2 * r + i] *= rescale;
        }
        // P = 2^(S - m') in the layout of operand A, the same for mma_m16n8k16 and wgmma.
        uint32_t p_frag[BLOCK_N / 16][4];
#pragma unroll
        for (int j = 0; j < BLOCK_N / 16; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = i % 2;
                const float* s = &s_acc[2 * j + i / 2][2 * r];
                const float p0 = ex2_approx_ftz(s[0] * tile_scale - shift[r]);
                const float p1 = ex2_approx_ftz(s[1] * tile_scale - shift[r]);
                row_sum[r] += p0 + p1;
                p_frag[j][i] = cvt_rn_x2<Element>(p0, p1);
            }

        // ---- O += P V  [BLOCK_M, HEAD_DIM], [64, DIM] of it in each warpgroup
        wait_for(smem.v_full[stage], tile / NUM_STAGES);
        wgmma_fence(o_acc, p_frag);
#pragma unroll
        for (int j = 0; j < BLOCK_N; j += 16)
            wgmma_m64nNk16<Element, MN_MAJOR>(o_acc, p_frag[j / 16],
                                              mn_major<BLOCK_N>(smem.v[stage], j), true);
        wgmma_commit_group();
        wgmma_wait_group<0>(o_acc, p_frag);

        __syncthreads();  // everyone has read the tile, which the next copy overwrites
        if (threadIdx.x == 0 && tile + NUM_STAGES < num_tiles) load_kv(tile + NUM_STAGES);
    }

    // ---- write O and lse
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = q_start + warp_row + 8 * r + lane / 4;
        const float sum = quad_sum(row_sum[r]);
        inverse[r] = sum == 0.0f ? 0.0f : 1.0f / sum;
        // log sum exp = m ln 2 + log l; -inf where no key is visible.
        if (lane % 4 == 0 && row < p.seq_q)
            p.lse[(int64_t(batch) * p.heads + head) * p.seq_q + row] =
                sum == 0.0f ? -INFINITY : row_max[r] * LN_2 + logf(sum);
    }
    // O takes the place of Q, which the last tile's products have read: a warp's 16 rows of a panel,
    // swizzled, are a box. TMA leaves out the rows past seq_q and the columns past HEAD_DIM, some of
    // which nobody has written.
#pragma unroll
    for (int n = 0; n < DIM / 8; n += 2) {
        uint32_t o_frag[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* x = &o_acc[n + i / 2][2 * (i % 2)];
            o_frag[i] = cvt_rn_x2<Element>(x[0] * inverse[i % 2], x[1] * inverse[i % 2]);
        }
        stmatrix_x4(swizzled<BLOCK_M>(smem.q, warp_row + lane % 16, 8 * n + lane / 16 * 8), o_frag);
    }
    fence_proxy_async();  // by each writer, before the barrier
    __syncwarp();
    if (lane == 0) {
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel)
            cp_async_bulk_tensor_store(p.o_map, PANEL * panel, q_start + warp_row, head, batch,
                                       smem.q[panel][warp_row]);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read<0>();
    }
}
