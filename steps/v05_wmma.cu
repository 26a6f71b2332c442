// v05 -- WMMA: both products on the tensor cores
// change: both products by WMMA, 16x16x16 at a time; a warp owns 16 query rows. Which lane holds
//     which element of a fragment is not documented, so S goes through shared memory to the softmax
//     and P through shared memory back
// why: the FMA pipes, which v04 keeps busy for more than half of the time, peak at 67 TFLOP/s; the
//     tensor cores multiply 15 times as fast, so that moving S, P and the operands through shared
//     memory becomes the limit: 3 to 4 times v04
// limits: bf16, fp16; head_dim 8-256 by 8; sm_80
#include "copy.cuh"
#include "wmma.cuh"

constexpr int WARP_ROWS = 16;  // query rows of a warp: the side of a fragment
constexpr int NUM_WARPS = 4;
constexpr int NUM_THREADS = 32 * NUM_WARPS;
constexpr int BLOCKS_PER_SM = 2;
constexpr int BLOCK_M = NUM_WARPS * WARP_ROWS;      // query rows
constexpr int BLOCK_N = HEAD_DIM <= 128 ? 64 : 32;  // keys of a tile
constexpr int DIM = (HEAD_DIM + 15) / 16 * 16;      // in whole fragments; zeros from HEAD_DIM on
constexpr int PITCH = DIM + 8;                      // 16 bytes more, against bank conflicts
constexpr int S_PITCH = BLOCK_N + 8;

using QFragment = wmma::fragment<wmma::matrix_a, 16, 16, 16, Element, wmma::row_major>;
using KFragment = wmma::fragment<wmma::matrix_b, 16, 16, 16, Element, wmma::col_major>;
using VFragment = wmma::fragment<wmma::matrix_b, 16, 16, 16, Element, wmma::row_major>;
using Accumulator = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;

// Private to a warp: no other warp reads or writes it.
struct alignas(32) WarpMemory {
    float s[WARP_ROWS][S_PITCH];  // S, then factors for O; at the end O, BLOCK_N columns at a time
    Element p[WARP_ROWS][S_PITCH];
};

struct SharedMemory {
    alignas(32) Element q[BLOCK_M][PITCH];
    alignas(32) Element k[BLOCK_N][PITCH];
    alignas(32) Element v[BLOCK_N][PITCH];
    WarpMemory warp[NUM_WARPS];
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
        if (VECTORS % NUM_THREADS != 0 && n >= VECTORS) break;
        uint4 x = load_uint4(rows + min(r, num_rows - 1) * stride + min(d, HEAD_DIM - VEC));
        if (r >= num_rows || d >= HEAD_DIM) x = {0, 0, 0, 0};
        store_uint4(&tile[r][d], x);
    }
}

// O *= factor, row by row; lanes 2 row and 2 row + 1 supply a row's factor. Which element of a
// fragment belongs to which row is not documented, but fragments of one type have one layout: the
// factors become a fragment, too, of a matrix that repeats each of them 16 times.
__device__ void multiply_rows(Accumulator (&o_acc)[DIM / 16], float factor, WarpMemory& warp) {
    const int lane = threadIdx.x % 32;
    __syncwarp();  // everyone has read S, whose place the factors take
    for (int i = 0; i < 8; i += 4)
        store_float4(&warp.s[lane / 2][lane % 2 * 8 + i],
                     make_float4(factor, factor, factor, factor));
    __syncwarp();  // the factors are complete
    Accumulator factors;
    wmma::load_matrix_sync(factors, &warp.s[0][0], S_PITCH, wmma::mem_row_major);
#pragma unroll
    for (int n = 0; n < DIM / 16; ++n)
#pragma unroll
        for (int i = 0; i < factors.num_elements; ++i) o_acc[n].x[i] *= factors.x[i];
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
    WarpMemory& warp = smem.warp[threadIdx.x / 32];
    // Softmax: two lanes share a row; each takes every other group of 4 keys.
    const int row = lane / 2;
    const int part = lane % 2;
    // Causal: query i sees the keys j <= i + offset, so the last query sees the last key.
    const int offset = p.seq_k - p.seq_q;
    const int block_keys = CAUSAL ? min(p.seq_k, q_start + BLOCK_M + offset) : p.seq_k;
    const int row_keys = CAUSAL ? min(p.seq_k, q_start + warp_row + row + offset + 1) : p.seq_k;

    // ---- load Q
    load_tile(smem.q, q + q_start * p.q_stride.row, p.q_stride.row, p.seq_q - q_start);

    // exp(scale s) = 2^(scale_log2 s): the hardware's exponential has base 2.
    const float scale_log2 = p.softmax_scale * LOG2_E;
    Accumulator o_acc[DIM / 16];
#pragma unroll
    for (int n = 0; n < DIM / 16; ++n) wmma::fill_fragment(o_acc[n], 0.0f);
    float row_max = -INFINITY;  // m, in units of log2
    float row_sum = 0.0f;       // this lane's share of l

    // ---- for each K/V tile
    for (int k_start = 0; k_start < block_keys; k_start += BLOCK_N) {
        __syncthreads();  // everyone has read the tile before
        load_tile(smem.k, k + k_start * p.k_stride.row, p.k_stride.row, p.seq_k - k_start);
        load_tile(smem.v, v + k_start * p.v_stride.row, p.v_stride.row, p.seq_k - k_start);
        __syncthreads();  // K and V, and at first Q, are complete

        // ---- S = Q K^T  [BLOCK_M, BLOCK_N], [WARP_ROWS, BLOCK_N] of it in each warp
        Accumulator s_acc[BLOCK_N / 16];
#pragma unroll
        for (int n = 0; n < BLOCK_N / 16; ++n) wmma::fill_fragment(s_acc[n], 0.0f);
#pragma unroll
        for (int d = 0; d < DIM; d += 16) {
            QFragment q_frag;
            wmma::load_matrix_sync(q_frag, &smem.q[warp_row][d], PITCH);
#pragma unroll
            for (int n = 0; n < BLOCK_N / 16; ++n) {
                KFragment k_frag;
                wmma::load_matrix_sync(k_frag, &smem.k[16 * n][d], PITCH);
                wmma::mma_sync(s_acc[n], q_frag, k_frag, s_acc[n]);
            }
        }
#pragma unroll
        for (int n = 0; n < BLOCK_N / 16; ++n)
            wmma::store_matrix_sync(&warp.s[0][16 * n], s_acc[n], S_PITCH, wmma::mem_row_major);
        __syncwarp();  // S is complete

        // ---- online softmax: m' = max(m, max S), P = 2^(S - m'), alpha = 2^(m - m')
        float s[BLOCK_N / 8][4];
        float row_max_new = row_max;
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; ++i) {
            const int col = 8 * i + 4 * part;
            const float4 quad = load_float4(&warp.s[row][col]);
            s[i][0] = quad.x, s[i][1] = quad.y, s[i][2] = quad.z, s[i][3] = quad.w;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                s[i][e] = k_start + col + e < row_keys ? s[i][e] * scale_log2 : -INFINITY;
                row_max_new = fmaxf(row_max_new, s[i][e]);
            }
        }
        row_max_new = fmaxf(row_max_new, __shfl_xor_sync(0xffffffff, row_max_new, 1));
        // Before the first visible key m' = -inf; 2^(s - 0) = 0 there, 2^(-inf + inf) is NaN.
        const float shift = row_max_new == -INFINITY ? 0.0f : row_max_new;
        const float rescale = exp2f(row_max - shift);
        row_max = row_max_new;
        row_sum *= rescale;
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                s[i][e] = exp2f(s[i][e] - shift);  // now P
                row_sum += s[i][e];
            }
            store_float4(&warp.p[row][8 * i + 4 * part],
                         make_float4(s[i][0], s[i][1], s[i][2], s[i][3]));
        }
        multiply_rows(o_acc, rescale, warp);  // its barriers also complete P

        // ---- O += P V  [BLOCK_M, HEAD_DIM], [WARP_ROWS, DIM] of it in each warp
        // Not unrolled: at head_dim 256 the registers beside O hold one fragment of P.
#pragma unroll 1
        for (int j = 0; j < BLOCK_N; j += 16) {
            QFragment p_frag;
            wmma::load_matrix_sync(p_frag, &warp.p[0][j], S_PITCH);
#pragma unroll
            for (int n = 0; n < DIM / 16; ++n) {
                VFragment v_frag;
                wmma::load_matrix_sync(v_frag, &smem.v[j][16 * n], PITCH);
                wmma::mma_sync(o_acc[n], p_frag, v_frag, o_acc[n]);
            }
        }
    }

    // ---- write O and lse
    row_sum += __shfl_xor_sync(0xffffffff, row_sum, 1);
    multiply_rows(o_acc, row_sum == 0.0f ? 0.0f : 1.0f / row_sum, warp);
    const int q_row = q_start + warp_row + row;
    Element* o = p.o + batch * p.o_stride.batch + head * p.o_stride.head + q_row * p.o_stride.row;
#pragma unroll
    for (int d_start = 0; d_start < DIM; d_start += BLOCK_N) {
        __syncwarp();  // everyone has read the previous columns
#pragma unroll
        for (int n = 0; n < BLOCK_N / 16; ++n)
            if (d_start + 16 * n < DIM)
                wmma::store_matrix_sync(&warp.s[0][16 * n], o_acc[d_start / 16 + n], S_PITCH,
                                        wmma::mem_row_major);
        __syncwarp();  // the columns are complete
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; ++i) {
            const int col = 8 * i + 4 * part;
            if (q_row < p.seq_q && d_start + col < HEAD_DIM)
                store_float4(o + d_start + col, load_float4(&warp.s[row][col]));
        }
    }
    // log sum exp = m ln 2 + log l; -inf where no key is visible.
    if (part == 0 && q_row < p.seq_q)
        p.lse[(int64_t(batch) * p.heads + head) * p.seq_q + q_row] =
            row_sum == 0.0f ? -INFINITY : row_max * LN_2 + logf(row_sum);
}
