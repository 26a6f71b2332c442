// v06 -- mma.sync: S, P and the softmax stay in registers
// change: the tensor cores by mma.sync, whose register layout is documented: a lane knows the row and
//     column of each of its elements of S, computes the softmax in place, and what it holds of P is
//     its share of the next product's operand; ldmatrix loads the other operands
// why: in v05 the operands come 4 bytes a lane, and S and P pass through shared memory both ways;
//     a quarter of the load instructions and four fifths of the bytes are left: 1.7 times v05
// limits: bf16, fp16; head_dim 8-256 by 8; sm_80
#include "copy.cuh"
#include "mma.cuh"

constexpr int M_FRAGS = 1;  // a warp's fragments of 16 query rows
constexpr int WARP_ROWS = 16 * M_FRAGS;
constexpr int NUM_WARPS = 4;
constexpr int NUM_THREADS = 32 * NUM_WARPS;
constexpr int BLOCKS_PER_SM = 2;
constexpr int BLOCK_M = NUM_WARPS * WARP_ROWS;  // query rows
constexpr int BLOCK_N = 64;                     // keys of a tile
constexpr int DIM = (HEAD_DIM + 15) / 16 * 16;  // in whole fragments; zeros from HEAD_DIM on
constexpr int PITCH = DIM + 8;  // of a row, odd in units of 16 bytes: 8 rows in 8 groups of banks

struct SharedMemory {
    Element q[BLOCK_M][PITCH];
    Element k[BLOCK_N][PITCH];
    Element v[BLOCK_N][PITCH];
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

// tile[r][d] = rows[r][d], zeros past the last row and past HEAD_DIM  [TILE_ROWS, DIM]
template <int TILE_ROWS>
__device__ void load_tile(Element (&tile)[TILE_ROWS][PITCH], const Element* rows, int64_t stride,
                          int num_rows) {
    constexpr int VECTORS = TILE_ROWS * (DIM / VEC);
#pragma unroll 8
    for (int start = 0; start < VECTORS; start += NUM_THREADS) {
        const int n = start + threadIdx.x;
        const int r = n / (DIM / VEC);
        const int d = n % (DIM / VEC) * VEC;
        uint4 x = load_uint4(rows + min(r, num_rows - 1) * stride + min(d, HEAD_DIM - VEC));
        if (r >= num_rows || d >= HEAD_DIM) x = {0, 0, 0, 0};
        store_uint4(&tile[r][d], x);
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

    // ---- load Q
    load_tile(smem.q, q + q_start * p.q_stride.row, p.q_stride.row, p.seq_q - q_start);

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
    for (int k_start = 0; k_start < block_keys; k_start += BLOCK_N) {
        __syncthreads();  // everyone has read the tile before
        load_tile(smem.k, k + k_start * p.k_stride.row, p.k_stride.row, p.seq_k - k_start);
        load_tile(smem.v, v + k_start * p.v_stride.row, p.v_stride.row, p.seq_k - k_start);
        __syncthreads();  // K and V, and at first Q, are complete

        // ---- S = Q K^T  [BLOCK_M, BLOCK_N], [WARP_ROWS, BLOCK_N] of it in each warp
        float s_acc[M_FRAGS][BLOCK_N / 8][4] = {};
#pragma unroll
        for (int d = 0; d < DIM; d += 16) {
            uint32_t q_frag[M_FRAGS][4];  // [16, 16] each
#pragma unroll
            for (int m = 0; m < M_FRAGS; ++m) {
                const int row = warp_row + 16 * m + lane % 16;
                ldmatrix_x4(q_frag[m], &smem.q[row][d + lane / 16 * 8]);
            }
#pragma unroll
            for (int n = 0; n < BLOCK_N; n += 16) {
                uint32_t k_frag[4];  // K^T [16, 8], of the keys n ... n + 7 and of the next 8
                const int row = n + lane / 16 * 8 + lane % 8;
                ldmatrix_x4(k_frag, &smem.k[row][d + lane / 8 % 2 * 8]);
#pragma unroll
                for (int m = 0; m < M_FRAGS; ++m) {
                    mma_m16n8k16<Element>(s_acc[m][n / 8], q_frag[m], k_frag[0], k_frag[1]);
                    mma_m16n8k16<Element>(s_acc[m][n / 8 + 1], q_frag[m], k_frag[2], k_frag[3]);
                }
            }
        }

        // ---- online softmax: m' = max(m, max S), alpha = 2^(m - m')
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
                const float row_max_new = fmaxf(row_max[m][r], tile_max);
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
                    const float p0 = ex2_approx_ftz(s[0] - shift[m][r]);
                    const float p1 = ex2_approx_ftz(s[1] - shift[m][r]);
                    row_sum[m][r] += p0 + p1;
                    p_frag[m][i] = cvt_rn_x2<Element>(p0, p1);
                }
#pragma unroll
            for (int d = 0; d < DIM; d += 16) {
                uint32_t v_frag[4];  // V [16, 8], of the columns d ... d + 7 and of the next 8
                const int row = j + lane % 16;
                ldmatrix_x4_trans(v_frag, &smem.v[row][d + lane / 16 * 8]);
#pragma unroll
                for (int m = 0; m < M_FRAGS; ++m) {
                    mma_m16n8k16<Element>(o_acc[m][d / 8], p_frag[m], v_frag[0], v_frag[1]);
                    mma_m16n8k16<Element>(o_acc[m][d / 8 + 1], p_frag[m], v_frag[2], v_frag[3]);
                }
            }
        }
    }

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
