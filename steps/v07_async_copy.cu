// v07 -- asynchronous copies: the next tile arrives while this one is computed
// change: cp.async copies K and V into a second buffer, past the registers; an XOR swizzle instead
//     of padding; 32 query rows a warp, so that a fragment of K or V serves two products; only the
//     tiles that hide keys are masked
// why: v06 is limited by the L1 data pipe, mostly by ldmatrix of K and V for 16 rows, and by the
//     wait for the copies; half of the bytes are left, and nobody waits: 1.8 times v06
// limits: bf16, fp16; head_dim 8-256 by 8; sm_80
//     tuned for two blocks per SM, which need Hopper's shared memory from head_dim 72 on: 194 KiB
#include "copy.cuh"
#include "mma.cuh"

constexpr int M_FRAGS = HEAD_DIM <= 128 ? 2 : 1;  // a warp's fragments of 16 query rows
constexpr int WARP_ROWS = 16 * M_FRAGS;
constexpr int NUM_WARPS = 4;
constexpr int NUM_THREADS = 32 * NUM_WARPS;
constexpr int BLOCKS_PER_SM = 2;
constexpr int BLOCK_M = NUM_WARPS * WARP_ROWS;      // query rows
constexpr int BLOCK_N = HEAD_DIM <= 128 ? 64 : 32;  // keys of a tile
constexpr int NUM_STAGES = 2;  // tiles in shared memory: stage is in use, stage ^ 1 in flight
constexpr int DIM = (HEAD_DIM + 15) / 16 * 16;   // in whole fragments; zeros from HEAD_DIM on
constexpr int PITCH = (DIM + 63) / 64 * 64;      // of a row, in whole 128 bytes: every bank once
constexpr bool Q_IN_REGISTERS = HEAD_DIM <= 64;  // where O and S leave room for it

struct SharedMemory {
    Element q[BLOCK_M][PITCH];
    Element k[NUM_STAGES][BLOCK_N][PITCH];
    Element v[NUM_STAGES][BLOCK_N][PITCH];
};

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_forward",
                 .grid = {{SEQ_Q, BLOCK_M}, {HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS,
                 .smem_bytes = sizeof(SharedMemory)}},
};
}

// Where column col of a row lies: the eight 16-byte chunks of every 128 bytes are permuted, in each
// of 8 rows differently, so that the same chunk of 8 rows touches every bank once. For a multiple d
// of 16 and a col below 16, swizzle(row, d + col) is swizzle(row, col) ^ d.
__device__ int swizzle(int row, int col) { return col ^ row % 8 * VEC; }

// Starts tile[r][swizzle(r, d)] = rows[r][d], zeros past the last row and past HEAD_DIM
// [TILE_ROWS, DIM]. Eight threads share a row; the swizzle is the same in all of a thread's rows.
template <int TILE_ROWS>
__device__ void load_tile(Element (&tile)[TILE_ROWS][PITCH], const Element* rows, int64_t stride,
                          int num_rows) {
    static_assert(TILE_ROWS % (NUM_THREADS / 8) == 0 && NUM_THREADS / 8 % 8 == 0);
    const int row = threadIdx.x / 8;
    const int col = threadIdx.x % 8 * VEC;
    Element* to = &tile[row][swizzle(row, col)];
    const Element* from = rows + row * stride + col;
    num_rows -= row;
#pragma unroll
    for (int r = 0; r < TILE_ROWS; r += NUM_THREADS / 8) {
#pragma unroll
        for (int d = 0; d < DIM; d += 8 * VEC)
            if (d + col < DIM)
                cp_async_cg(to + r * PITCH + d, from + d, r < num_rows && d + col < HEAD_DIM);
        from += NUM_THREADS / 8 * stride;
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM)
    attention_forward(const __grid_constant__ AttentionParams p) {
    SharedMemory& smem = shared_memory<SharedMemory>();
    const int q_blocks = (p.seq_q + BLOCK_M - 1) / BLOCK_M;
    const int q_start = blockIdx.x % q_blocks * BLOCK_M;
    const int head = blockIdx.x / q_blocks % p.heads;
    const int batch = blockIdx.x / q_blocks / p.heads;
    const int kv_head = head / (p.heads / p.kv_heads);
    const Element* q = p.q + batch * p.q_stride.batch + head * p.q_stride.head;
    const Element* k = p.k + batch * p.k_stride.batch + kv_head * p.k_stride.head;
    const Element* v = p.v + batch * p.v_stride.batch + kv_head * p.v_stride.head;
    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * WARP_ROWS;  // the warp's first row in the block
    // Causal: query i sees the keys j <= i + offset, so the last query sees the last key.
    const int offset = p.seq_k - p.seq_q;
    const int block_keys = CAUSAL ? min(p.seq_k, q_start + BLOCK_M + offset) : p.seq_k;

    const auto load_kv = [&](int k_start, int stage) {
        load_tile(smem.k[stage], k + k_start * p.k_stride.row, p.k_stride.row, p.seq_k - k_start);
        load_tile(smem.v[stage], v + k_start * p.v_stride.row, p.v_stride.row, p.seq_k - k_start);
    };
    uint32_t q_frag[DIM / 16][M_FRAGS][4];  // [16, 16] each
    const auto load_q_frag = [&](int d) {
#pragma unroll
        for (int m = 0; m < M_FRAGS; ++m) {
            const int row = warp_row + 16 * m + lane % 16;
            ldmatrix_x4(q_frag[d / 16][m], &smem.q[row][swizzle(row, lane / 16 * 8) ^ d]);
        }
    };

    // ---- load Q, and the first tile
    load_tile(smem.q, q + q_start * p.q_stride.row, p.q_stride.row, p.seq_q - q_start);
    load_kv(0, 0);
    cp_async_commit_group();
    if (Q_IN_REGISTERS) {
        cp_async_wait_group<0>();
        __syncthreads();  // Q, and with it the first tile, is complete
#pragma unroll
        for (int d = 0; d < DIM; d += 16) load_q_frag(d);
    }

    // exp(scale s) = 2^(scale_log2 s): the hardware's exponential has base 2.
    const float scale_log2 = p.softmax_scale * LOG2_E;
    // A lane's s_acc[m][n][2 r + i] and o_acc[m][n][2 r + i], with r and i 0 or 1, are the elements
    // of S and O in row 16 m + 8 r + lane / 4 of the warp's rows and column 8 n + 2 (lane % 4) + i.
    float o_acc[M_FRAGS][DIM / 8][4] = {};
    float row_max[M_FRAGS][2];       // m, in units of log2
    float row_sum[M_FRAGS][2] = {};  // this lane's share of l
#pragma unroll
    for (int m = 0; m < M_FRAGS; ++m) row_max[m][0] = row_max[m][1] = -INFINITY;

    // ---- for each K/V tile
    for (int k_start = 0, stage = 0; k_start < block_keys; k_start += BLOCK_N, stage ^= 1) {
        cp_async_wait_group<0>();
        __syncthreads();  // K and V, and at first Q, are complete; everyone has read the tile before

        // ---- S = Q K^T  [BLOCK_M, BLOCK_N], [WARP_ROWS, BLOCK_N] of it in each warp
        float s_acc[M_FRAGS][BLOCK_N / 8][4] = {};
#pragma unroll
        for (int d = 0; d < DIM; d += 16) {
            if (!Q_IN_REGISTERS) load_q_frag(d);
#pragma unroll
            for (int n = 0; n < BLOCK_N; n += 16) {
                uint32_t k_frag[4];  // K^T [16, 8], of the keys n ... n + 7 and of the next 8
                const int row = n + lane / 16 * 8 + lane % 8;
                ldmatrix_x4(k_frag, &smem.k[stage][row][swizzle(row, lane / 8 % 2 * 8) ^ d]);
#pragma unroll
                for (int m = 0; m < M_FRAGS; ++m) {
                    const uint32_t (&a)[4] = q_frag[d / 16][m];
                    mma_m16n8k16<Element>(s_acc[m][n / 8], a, k_frag[0], k_frag[1]);
                    mma_m16n8k16<Element>(s_acc[m][n / 8 + 1], a, k_frag[2], k_frag[3]);
                }
            }
        }

        // ---- online softmax: m' = max(m, max S), alpha = 2^(m - m')
        // Where no row of the warp has a hidden key, the scale becomes part of the exponential's
        // multiply-add; with a negative one the largest S is not the largest logit. All of a row's P
        // then share the rounding error of scale * max, which cancels (for logits up to 2^27).
        float tile_scale = scale_log2;
        const int warp_row_keys = CAUSAL ? min(p.seq_k, q_start + warp_row + offset + 1) : p.seq_k;
        if (k_start + BLOCK_N > warp_row_keys || scale_log2 < 0.0f) {
            tile_scale = 1.0f;
#pragma unroll
            for (int m = 0; m < M_FRAGS; ++m)
#pragma unroll
                for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int row = q_start + warp_row + 16 * m + 8 * (i / 2) + lane / 4;
                        const int row_keys = CAUSAL ? min(p.seq_k, row + offset + 1) : p.seq_k;
                        const int key = k_start + 8 * n + 2 * (lane % 4) + i % 2;
                        float& s = s_acc[m][n][i];
                        s = key < row_keys ? s * scale_log2 : -INFINITY;
                    }
        }
        float shift[M_FRAGS][2];
#pragma unroll
        for (int m = 0; m < M_FRAGS; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float tile_max = -INFINITY;
#pragma unroll
                for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) tile_max = fmaxf(tile_max, s_acc[m][n][2 * r + i]);
                tile_max = quad_max(tile_max);
                const float row_max_new = fmaxf(row_max[m][r], tile_max * tile_scale);
                // Before the first visible key m' = -inf; 2^(s - 0) = 0 there, 2^(-inf + inf) is NaN.
                shift[m][r] = row_max_new == -INFINITY ? 0.0f : row_max_new;
                const float rescale = ex2_approx_ftz(row_max[m][r] - shift[m][r]);
                row_max[m][r] = row_max_new;
                row_sum[m][r] *= rescale;
#pragma unroll
                for (int n = 0; n < DIM / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) o_acc[m][n][2 * r + i] *= rescale;
            }

        // In flight during the exponentials of this tile and O += P V.
        if (k_start + BLOCK_N < block_keys) load_kv(k_start + BLOCK_N, stage ^ 1);
        cp_async_commit_group();

        // ---- O += P V  [BLOCK_M, HEAD_DIM], [WARP_ROWS, DIM] of it in each warp
#pragma unroll
        for (int j = 0; j < BLOCK_N; j += 16) {
            // P = 2^(S - m'): a lane's elements of two accumulators [16, 8] side by side are its
            // elements of an operand [16, 16].
            uint32_t p_frag[M_FRAGS][4];
#pragma unroll
            for (int m = 0; m < M_FRAGS; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int r = i % 2;
                    const float* s = &s_acc[m][j / 8 + i / 2][2 * r];
                    const float p0 = ex2_approx_ftz(s[0] * tile_scale - shift[m][r]);
                    const float p1 = ex2_approx_ftz(s[1] * tile_scale - shift[m][r]);
                    row_sum[m][r] += p0 + p1;
                    p_frag[m][i] = cvt_rn_x2<Element>(p0, p1);
                }
#pragma unroll
            for (int d = 0; d < DIM; d += 16) {
                uint32_t v_frag[4];  // V [16, 8], of the columns d ... d + 7 and of the next 8
                const int row = j + lane % 16;
                ldmatrix_x4_trans(v_frag, &smem.v[stage][row][swizzle(row, lane / 16 * 8) ^ d]);
#pragma unroll
                for (int m = 0; m < M_FRAGS; ++m) {
                    mma_m16n8k16<Element>(o_acc[m][d / 8], p_frag[m], v_frag[0], v_frag[1]);
                    mma_m16n8k16<Element>(o_acc[m][d / 8 + 1], p_frag[m], v_frag[2], v_frag[3]);
                }
            }
        }
    }

    cp_async_wait_group<0>();  // a block that sees no key has not yet waited for its copies

    // ---- write O and lse
#pragma unroll
    for (int m = 0; m < M_FRAGS; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = q_start + warp_row + 16 * m + 8 * r + lane / 4;
            const float sum = quad_sum(row_sum[m][r]);
            if (row >= p.seq_q) continue;
            const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
            Element* o =
                p.o + batch * p.o_stride.batch + head * p.o_stride.head + row * p.o_stride.row;
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; ++n) {
                const float* x = &o_acc[m][n][2 * r];
                *reinterpret_cast<uint32_t*>(o + 8 * n + 2 * (lane % 4)) =
                    cvt_rn_x2<Element>(x[0] * inverse, x[1] * inverse);
            }
            // log sum exp = m ln 2 + log l; -inf where no key is visible.
            if (lane % 4 == 0)
                p.lse[(int64_t(batch) * p.heads + head) * p.seq_q + row] =
                    sum == 0.0f ? -INFINITY : row_max[m][r] * LN_2 + logf(sum);
        }
}
