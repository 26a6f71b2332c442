// v03 -- online softmax: one fused kernel, one thread a query row
// change: one kernel walks over K and V tile by tile and keeps a running max, a running sum and a
//     row of O that it rescales when the max grows; of S and P a thread has BLOCK_N values at a
//     time, in registers
// why: v02 moves 12 bytes a score through global memory and needs memory that grows with seq_q *
//     seq_k; here neither exists. A multiplication takes one word from shared memory, as in v02: no
//     faster is predicted
// limits: bf16, fp16, fp32; head_dim 8-256 by 8; sm_80; more than 99 KiB of shared memory from
//     head_dim 160 on, in fp32, which sm_86 and sm_89 lack; above head_dim 160 a row of O does not
//     fit in a thread's registers: correct, but slow
#include "attention.cuh"

constexpr int BLOCK_M = 128;                                    // query rows, one thread each
constexpr int BLOCK_N = HEAD_DIM <= 128 && VEC == 8 ? 32 : 16;  // keys of a tile: S must fit, too
constexpr int NUM_THREADS = BLOCK_M;
constexpr int BLOCKS_PER_SM = 2;  // one computes while the other loads

struct SharedMemory {
    // A thread reads its own row 16 bytes at a time; where HEAD_DIM is a multiple of 2 VEC, the
    // padding puts eight rows in different banks.
    Element q[BLOCK_M][HEAD_DIM + VEC];
    // All threads read the same key at the same time: a broadcast, no padding needed.
    float k[BLOCK_N][HEAD_DIM];
    float v[BLOCK_N][HEAD_DIM];
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

// VEC elements of row r from column c on, as floats; zeros past the last row. The load itself is
// not conditional (it reads the last row then), so that the compiler can issue the loads of a whole
// tile before it waits for the first.
__device__ void load_row(float (&x)[VEC], const Element* rows, int64_t stride, int num_rows, int r,
                         int c) {
    load_vector(x, rows + min(r, num_rows - 1) * stride + c);
#pragma unroll
    for (int i = 0; i < VEC; ++i) x[i] = r < num_rows ? x[i] : 0.0f;
}

// tile[r][d] = rows[r][d]  [BLOCK_N, HEAD_DIM]
__device__ void load_tile(float (&tile)[BLOCK_N][HEAD_DIM], const Element* rows, int64_t stride,
                          int num_rows) {
    constexpr int VECTORS = BLOCK_N * (HEAD_DIM / VEC);
#pragma unroll 8
    for (int start = 0; start < VECTORS; start += NUM_THREADS) {
        const int n = start + threadIdx.x;
        const int r = n / (HEAD_DIM / VEC);
        const int d = n % (HEAD_DIM / VEC) * VEC;
        if (VECTORS % NUM_THREADS != 0 && n >= VECTORS) break;
        float x[VEC];
        load_row(x, rows, stride, num_rows, r, d);
#pragma unroll
        for (int i = 0; i < VEC; i += 4)
            store_float4(&tile[r][d + i], make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]));
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
    const int row = q_start + threadIdx.x;
    // Causal: query i sees the keys j <= i + offset, so the last query sees the last key.
    const int offset = p.seq_k - p.seq_q;
    const int row_keys = CAUSAL ? min(p.seq_k, row + offset + 1) : p.seq_k;
    const int block_keys = CAUSAL ? min(p.seq_k, q_start + BLOCK_M + offset) : p.seq_k;

    // ---- load Q
    for (int n = threadIdx.x; n < BLOCK_M * (HEAD_DIM / VEC); n += NUM_THREADS) {
        const int r = n / (HEAD_DIM / VEC);
        const int d = n % (HEAD_DIM / VEC) * VEC;
        float x[VEC];
        load_row(x, q + q_start * p.q_stride.row, p.q_stride.row, p.seq_q - q_start, r, d);
        store_vector(&smem.q[r][d], x);
    }

    // exp(scale s) = 2^(scale_log2 s): the hardware's exponential has base 2.
    const float scale_log2 = p.softmax_scale * LOG2_E;
    float o_acc[HEAD_DIM] = {};
    float row_max = -INFINITY;  // m, in units of log2
    float row_sum = 0.0f;       // l

    // ---- for each K/V tile
    for (int k_start = 0; k_start < block_keys; k_start += BLOCK_N) {
        __syncthreads();  // everyone has read the tile before; Q is complete after the next barrier
        load_tile(smem.k, k + k_start * p.k_stride.row, p.k_stride.row, p.seq_k - k_start);
        load_tile(smem.v, v + k_start * p.v_stride.row, p.v_stride.row, p.seq_k - k_start);
        __syncthreads();  // the tile is complete

        // ---- S = Q K^T  [BLOCK_M, BLOCK_N], a row of it in each thread
        float s[BLOCK_N] = {};
#pragma unroll 4
        for (int d = 0; d < HEAD_DIM; d += VEC) {
            float a[VEC];
            load_vector(a, &smem.q[threadIdx.x][d]);
#pragma unroll
            for (int j = 0; j < BLOCK_N; ++j) {
#pragma unroll
                for (int i = 0; i < VEC; i += 4) {
                    const float4 b = load_float4(&smem.k[j][d + i]);
                    s[j] += a[i] * b.x + a[i + 1] * b.y + a[i + 2] * b.z + a[i + 3] * b.w;
                }
            }
        }

        // ---- online softmax: m' = max(m, max S), P = 2^(S - m'), alpha = 2^(m - m')
        float row_max_new = row_max;
#pragma unroll
        for (int j = 0; j < BLOCK_N; ++j) {
            s[j] = k_start + j < row_keys ? s[j] * scale_log2 : -INFINITY;
            row_max_new = fmaxf(row_max_new, s[j]);
        }
        // Before the first visible key m' = -inf; 2^(s - 0) = 0 there, 2^(-inf + inf) is NaN.
        const float shift = row_max_new == -INFINITY ? 0.0f : row_max_new;
        const float rescale = exp2f(row_max - shift);
        row_max = row_max_new;
        row_sum *= rescale;
#pragma unroll
        for (int j = 0; j < BLOCK_N; ++j) {
            s[j] = exp2f(s[j] - shift);  // now P
            row_sum += s[j];
        }

        // ---- O = alpha O + P V  [BLOCK_M, HEAD_DIM], a row of it in each thread
#pragma unroll
        for (int d = 0; d < HEAD_DIM; d += 4) {
#pragma unroll
            for (int i = 0; i < 4; ++i) o_acc[d + i] *= rescale;
#pragma unroll
            for (int j = 0; j < BLOCK_N; ++j) {
                const float4 b = load_float4(&smem.v[j][d]);
                o_acc[d] += s[j] * b.x;
                o_acc[d + 1] += s[j] * b.y;
                o_acc[d + 2] += s[j] * b.z;
                o_acc[d + 3] += s[j] * b.w;
            }
        }
    }

    // ---- write O and lse
    if (row >= p.seq_q) return;
    Element* o = p.o + batch * p.o_stride.batch + head * p.o_stride.head + row * p.o_stride.row;
    const float inverse = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += VEC) {
        float x[VEC];
#pragma unroll
        for (int i = 0; i < VEC; ++i) x[i] = o_acc[d + i] * inverse;
        store_vector(o + d, x);
    }
    // log sum exp = m ln 2 + log l; -inf where no key is visible.
    p.lse[(int64_t(batch) * p.heads + head) * p.seq_q + row] =
        row_sum == 0.0f ? -INFINITY : row_max * LN_2 + logf(row_sum);
}
