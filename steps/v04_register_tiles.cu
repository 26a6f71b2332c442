// v04 -- register tiles: a thread owns a small tile of S and of O
// change: 16 threads share a query row and each works on ROWS rows, so that a value from shared
//     memory serves several multiplications; row max and sum by warp shuffles; P goes through
//     shared memory, because the threads that need a row of it are not the ones that computed it
// why: v03 takes a word from shared memory for each multiplication; here it is 3/8 in S = Q K^T and
//     1/4 in O += P V, so that the multipliers should become the limit; predicted: 1.7 times v03
// limits: bf16, fp16, fp32; head_dim 8-256 by 8; sm_80; more than 99 KiB of shared memory from
//     head_dim 216 on, which sm_86 and sm_89 lack
#include "attention.cuh"

constexpr int ROWS = HEAD_DIM <= 128 ? 8 : 4;  // of a thread's tiles: what its registers hold
constexpr int COLS = 4;                        // of a thread's tile of S
constexpr int LANES = 16;                      // threads that share a row: half a warp
constexpr int NUM_THREADS = 128;
constexpr int BLOCKS_PER_SM = 2;  // one computes while the other loads
constexpr int GROUPS = NUM_THREADS / LANES;
constexpr int BLOCK_M = GROUPS * ROWS;                            // query rows
constexpr int BLOCK_N = LANES * COLS;                             // keys of a tile
constexpr int CHUNKS = (HEAD_DIM + 4 * LANES - 1) / (4 * LANES);  // quads of a row of a thread's O

// What a thread owns comes in quads, so that it reads 16 bytes at a time: by its group the query
// rows 4 * (group + GROUPS * i) + {0, 1, 2, 3}, by its lane the keys 4 * (lane + LANES * i) + {0,
// 1, 2, 3} and the same columns of O.
__device__ constexpr int quad(int index, int owner, int owners) {
    return 4 * (owner + owners * (index / 4)) + index % 4;
}

// Q and K are transposed: for one d a thread reads its rows side by side, and neighbouring lanes
// read neighbouring quads, from different banks. Rows of P are 4 floats longer than a multiple of
// the 32 banks: the two groups of a warp read rows 4 apart, and their quads must not meet in the
// same banks.
struct SharedMemory {
    float q[HEAD_DIM][BLOCK_M];
    union {
        float k[HEAD_DIM][BLOCK_N];
        // Takes the place of K. What lies past HEAD_DIM is never written: it goes into columns of O
        // that nobody writes out.
        float v[BLOCK_N][CHUNKS * 4 * LANES];
    };
    float p[BLOCK_M][BLOCK_N + 4];
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

// tile[d][r] = rows[r][d]  [HEAD_DIM, TILE_ROWS]
template <int TILE_ROWS>
__device__ void load_transposed(float (&tile)[HEAD_DIM][TILE_ROWS], const Element* rows,
                                int64_t stride, int num_rows) {
    constexpr int VECTORS = TILE_ROWS * (HEAD_DIM / VEC);
#pragma unroll 8
    for (int start = 0; start < VECTORS; start += NUM_THREADS) {
        const int n = start + threadIdx.x;
        const int r = n % TILE_ROWS;
        const int d = n / TILE_ROWS * VEC;
        if (VECTORS % NUM_THREADS != 0 && n >= VECTORS) break;
        float x[VEC];
        load_row(x, rows, stride, num_rows, r, d);
#pragma unroll
        for (int i = 0; i < VEC; ++i) tile[d + i][r] = x[i];
    }
}

// tile[r][d] = rows[r][d]  [TILE_ROWS, HEAD_DIM]
template <int TILE_ROWS, int PITCH>
__device__ void load_tile(float (&tile)[TILE_ROWS][PITCH], const Element* rows, int64_t stride,
                          int num_rows) {
    constexpr int VECTORS = TILE_ROWS * (HEAD_DIM / VEC);
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

// Four values side by side in shared memory to registers.
__device__ void load_quad(float* x, const float* p) {
    const float4 quad = load_float4(p);
    x[0] = quad.x, x[1] = quad.y, x[2] = quad.z, x[3] = quad.w;
}

// The maximum (or sum) over the LANES threads that share a row, known to all of them.
template <typename Combine>
__device__ float row_reduce(float x, Combine combine) {
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2)
        x = combine(x, __shfl_xor_sync(0xffffffff, x, offset));
    return x;
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
    const int lane = threadIdx.x % LANES;
    const int group = threadIdx.x / LANES;
    // Causal: query i sees the keys j <= i + offset, so the last query sees the last key.
    const int offset = p.seq_k - p.seq_q;
    const int block_keys = CAUSAL ? min(p.seq_k, q_start + BLOCK_M + offset) : p.seq_k;

    // ---- load Q
    load_transposed(smem.q, q + q_start * p.q_stride.row, p.q_stride.row, p.seq_q - q_start);

    // exp(scale s) = 2^(scale_log2 s): the hardware's exponential has base 2.
    const float scale_log2 = p.softmax_scale * LOG2_E;
    float o_acc[ROWS][CHUNKS][4] = {};
    float row_max[ROWS];       // m, in units of log2
    float row_sum[ROWS] = {};  // this thread's share of l
#pragma unroll
    for (int r = 0; r < ROWS; ++r) row_max[r] = -INFINITY;

    // ---- for each K/V tile
    for (int k_start = 0; k_start < block_keys; k_start += BLOCK_N) {
        __syncthreads();  // everyone has read V and P of the tile before
        load_transposed(smem.k, k + k_start * p.k_stride.row, p.k_stride.row, p.seq_k - k_start);
        __syncthreads();  // K, and at first Q, is complete

        // ---- S = Q K^T  [BLOCK_M, BLOCK_N], [ROWS, COLS] of it in each thread
        float s[ROWS][COLS] = {};
#pragma unroll 4
        for (int d = 0; d < HEAD_DIM; ++d) {
            float a[ROWS], b[COLS];
#pragma unroll
            for (int r = 0; r < ROWS; r += 4) load_quad(&a[r], &smem.q[d][quad(r, group, GROUPS)]);
#pragma unroll
            for (int c = 0; c < COLS; c += 4) load_quad(&b[c], &smem.k[d][quad(c, lane, LANES)]);
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int c = 0; c < COLS; ++c) s[r][c] += a[r] * b[c];
        }

        // ---- online softmax: m' = max(m, max S), P = 2^(S - m'), alpha = 2^(m - m')
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int row = quad(r, group, GROUPS);
            const int row_keys = CAUSAL ? min(p.seq_k, q_start + row + offset + 1) : p.seq_k;
            float tile_max = -INFINITY;
#pragma unroll
            for (int c = 0; c < COLS; ++c) {
                const int key = k_start + quad(c, lane, LANES);
                s[r][c] = key < row_keys ? s[r][c] * scale_log2 : -INFINITY;
                tile_max = fmaxf(tile_max, s[r][c]);
            }
            tile_max = row_reduce(tile_max, [](float x, float y) { return fmaxf(x, y); });
            const float row_max_new = fmaxf(row_max[r], tile_max);
            // Before the first visible key m' = -inf; 2^(s - 0) = 0 there, 2^(-inf + inf) is NaN.
            const float shift = row_max_new == -INFINITY ? 0.0f : row_max_new;
            const float rescale = exp2f(row_max[r] - shift);
            row_max[r] = row_max_new;
            row_sum[r] *= rescale;
#pragma unroll
            for (int c = 0; c < COLS; ++c) {
                s[r][c] = exp2f(s[r][c] - shift);  // now P
                row_sum[r] += s[r][c];
            }
#pragma unroll
            for (int c = 0; c < COLS; c += 4)
                store_float4(&smem.p[row][quad(c, lane, LANES)],
                             make_float4(s[r][c], s[r][c + 1], s[r][c + 2], s[r][c + 3]));
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
                for (int i = 0; i < 4; ++i) o_acc[r][c][i] *= rescale;
        }

        __syncthreads();  // P is complete, and everyone has read K
        load_tile(smem.v, v + k_start * p.v_stride.row, p.v_stride.row, p.seq_k - k_start);
        __syncthreads();  // V is complete

        // ---- O += P V  [BLOCK_M, HEAD_DIM], [ROWS, 4 CHUNKS] of it in each thread
#pragma unroll 2
        for (int j = 0; j < BLOCK_N; j += 4) {
            float a[ROWS][4];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) load_quad(a[r], &smem.p[quad(r, group, GROUPS)][j]);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    float b[4];
                    load_quad(b, &smem.v[j + i][4 * (lane + LANES * c)]);
#pragma unroll
                    for (int r = 0; r < ROWS; ++r)
#pragma unroll
                        for (int e = 0; e < 4; ++e) o_acc[r][c][e] += a[r][i] * b[e];
                }
        }
    }

    // ---- write O and lse
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int row = q_start + quad(r, group, GROUPS);
        const float sum = row_reduce(row_sum[r], [](float x, float y) { return x + y; });
        if (row >= p.seq_q) continue;
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        Element* o = p.o + batch * p.o_stride.batch + head * p.o_stride.head + row * p.o_stride.row;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int d = 4 * (lane + LANES * c);
            const float (&x)[4] = o_acc[r][c];
            if (d < HEAD_DIM)
                store_float4(o + d, make_float4(x[0] * inverse, x[1] * inverse, x[2] * inverse,
                                                x[3] * inverse));
        }
        // log sum exp = m ln 2 + log l; -inf where no key is visible.
        if (lane == 0)
            p.lse[(int64_t(batch) * p.heads + head) * p.seq_q + row] =
                sum == 0.0f ? -INFINITY : row_max[r] * LN_2 + logf(sum);
    }
}
