// b02 -- register tiles: tiles in shared memory, a thread owns a small tile of every product
// change: 16 threads share a row of a gradient and each works on ROWS rows; both kernels keep a
//     tile of rows of their own in shared memory and take the other side's rows tile by tile; P and
//     dS go through shared memory, because the threads that need a row of them are not the ones
//     that computed it
// why: b01 loads an operand for each multiplication, most of them from local memory, where its
//     vectors are spilled; here a value from shared memory serves 2 to 8 multiplications: 20 times
//     b01
// limits: bf16, fp16, fp32; head_dim 8-256 by 8; sm_80; more than 99 KiB of shared memory from
//     head_dim 72 on, which sm_86 and sm_89 lack
#include "backward.cuh"

constexpr int ROWS = HEAD_DIM <= 128 ? 4 : 2;  // of a thread's tiles: of S, dP and the gradients
constexpr int COLS = 2;                        // of a thread's tiles of S and dP
constexpr int LANES = 16;                      // threads that share a row: half a warp
constexpr int NUM_THREADS = 256;
constexpr int GROUPS = NUM_THREADS / LANES;
constexpr int OWN = GROUPS * ROWS;   // rows of the gradients that a block computes
constexpr int OTHER = LANES * COLS;  // rows of a tile of the other side
constexpr int CHUNKS =
    (HEAD_DIM + 4 * LANES - 1) / (4 * LANES);  // quads of a row that are a thread's

// A thread's columns of a gradient come in quads, so that it reads 16 bytes at a time: 4 * (lane +
// LANES * i) + {0, 1, 2, 3}. Rows are 4 floats longer than whole quads: eight lanes that each read
// 16 bytes of eight consecutive rows then touch all 32 banks once. What lies past HEAD_DIM is never
// written: it goes into columns of a gradient that nobody writes out.
constexpr int PITCH = 4 * LANES * CHUNKS + 4;

// In attention_dq a block's own rows are queries and the others keys, in attention_dk_dv the other
// way round: S = a b^T of the first pair, Q and K, dP = a b^T of the second one, dO and V.
struct SharedMemory {
    float own_qk[OWN][PITCH];   // Q or K
    float own_dov[OWN][PITCH];  // dO or V
    float other_qk[OTHER][PITCH];
    float other_dov[OTHER][PITCH];
    float p[OWN][OTHER + 4];
    float ds[OWN][OTHER + 4];
    float lse[OTHER], delta[OTHER];  // where the others are queries
};

constexpr int DELTA_ROWS = NUM_THREADS / LANES;  // of a block of attention_delta

extern "C" {
__constant__ BackwardDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_delta",
                 .grid = {{SEQ_Q, DELTA_ROWS}, {HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS},
                {.name = "attention_dq",
                 .grid = {{SEQ_Q, OWN}, {HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS,
                 .smem_bytes = sizeof(SharedMemory)},
                {.name = "attention_dk_dv",
                 .grid = {{SEQ_K, OWN}, {KV_HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS,
                 .smem_bytes = sizeof(SharedMemory)}},
    .workspace = {{.element_bytes = sizeof(float),  // delta
                   .shape = {{BATCH, 1}, {HEADS, 1}, {SEQ_Q, 1}}}},
};
}

// tile[r][d] = rows[r][d]  [TILE_ROWS, HEAD_DIM], zeros past the last row. The load itself is not
// conditional (it reads the last row then), so that the compiler can issue the loads of a whole tile
// before it waits for the first.
template <int TILE_ROWS>
__device__ void load_tile(float (&tile)[TILE_ROWS][PITCH], const Element* rows, int64_t stride,
                          int num_rows) {
    constexpr int VECTORS = TILE_ROWS * (HEAD_DIM / VEC);
#pragma unroll 4
    for (int start = 0; start < VECTORS; start += NUM_THREADS) {
        const int n = start + threadIdx.x;
        const int r = n / (HEAD_DIM / VEC);
        const int d = n % (HEAD_DIM / VEC) * VEC;
        if (VECTORS % NUM_THREADS != 0 && n >= VECTORS) break;
        float x[VEC];
        load_vector(x, rows + min(r, num_rows - 1) * stride + d);
#pragma unroll
        for (int i = 0; i < VEC; ++i) x[i] = r < num_rows ? x[i] : 0.0f;
#pragma unroll
        for (int i = 0; i < VEC; i += 4)
            store_float4(&tile[r][d + i], make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]));
    }
}

// x = own other^T: of the rows group * ROWS + r and lane + LANES * c  [ROWS, COLS]
__device__ void multiply(float (&x)[ROWS][COLS], const float (&own)[OWN][PITCH],
                         const float (&other)[OTHER][PITCH]) {
    const int lane = threadIdx.x % LANES;
    const int row = threadIdx.x / LANES * ROWS;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLS; ++c) x[r][c] = 0.0f;
#pragma unroll 8
    for (int d = 0; d < HEAD_DIM; d += 4) {
        float4 b[COLS];
#pragma unroll
        for (int c = 0; c < COLS; ++c) b[c] = load_float4(&other[lane + LANES * c][d]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float4 a = load_float4(&own[row + r][d]);  // the same for half a warp
#pragma unroll
            for (int c = 0; c < COLS; ++c)
                x[r][c] += a.x * b[c].x + a.y * b[c].y + a.z * b[c].z + a.w * b[c].w;
        }
    }
}

// A thread's share of a gradient: the rows group * ROWS + r, the columns in quads.
using Gradient = float[ROWS][CHUNKS][4];

// gradient += weights other  [ROWS, HEAD_DIM]
__device__ void add_product(Gradient& gradient, const float (&weights)[OWN][OTHER + 4],
                            const float (&other)[OTHER][PITCH]) {
    const int lane = threadIdx.x % LANES;
    const int row = threadIdx.x / LANES * ROWS;
#pragma unroll
    for (int j = 0; j < OTHER; j += 4) {
        float w[ROWS][4];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float4 x = load_float4(&weights[row + r][j]);  // the same for half a warp
            w[r][0] = x.x, w[r][1] = x.y, w[r][2] = x.z, w[r][3] = x.w;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                const float4 b = load_float4(&other[j + i][4 * (lane + LANES * chunk)]);
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    gradient[r][chunk][0] += w[r][i] * b.x;
                    gradient[r][chunk][1] += w[r][i] * b.y;
                    gradient[r][chunk][2] += w[r][i] * b.z;
                    gradient[r][chunk][3] += w[r][i] * b.w;
                }
            }
    }
}

// rows[r] = factor gradient[r], for the rows that there are
__device__ void store_gradient(Element* rows, int64_t stride, int num_rows,
                               const Gradient& gradient, float factor) {
    const int lane = threadIdx.x % LANES;
    const int row = threadIdx.x / LANES * ROWS;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const int d = 4 * (lane + LANES * chunk);
            const float* x = gradient[r][chunk];
            if (row + r < num_rows && d < HEAD_DIM)
                store_float4(
                    rows + (row + r) * stride + d,
                    make_float4(factor * x[0], factor * x[1], factor * x[2], factor * x[3]));
        }
}

// P = exp(S - lse), 0 in a row that sees no key: its lse is -inf. exp x = 2^(x log2 e): the
// hardware's exponential has base 2.
__device__ float probability(float s, float scale_log2, float lse) {
    return lse == -INFINITY ? 0.0f : exp2f(s * scale_log2 - lse * LOG2_E);
}

// delta = rowsum(dO * O)  [batch, heads, seq_q], LANES threads a row
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_delta(const __grid_constant__ BackwardParams p) {
    const int q_blocks = (p.seq_q + DELTA_ROWS - 1) / DELTA_ROWS;
    const int i = blockIdx.x % q_blocks * DELTA_ROWS + threadIdx.x / LANES;
    const int head = blockIdx.x / q_blocks % p.heads;
    const int batch = blockIdx.x / q_blocks / p.heads;

    const int row = min(i, p.seq_q - 1);  // all lanes take part in the shuffles
    const Element* o =
        p.o + batch * p.o_stride.batch + head * p.o_stride.head + row * p.o_stride.row;
    const Element* dout =
        p.dout + batch * p.dout_stride.batch + head * p.dout_stride.head + row * p.dout_stride.row;
    float sum = 0.0f;
    for (int d = threadIdx.x % LANES * VEC; d < HEAD_DIM; d += LANES * VEC) {
        float x[VEC], y[VEC];
        load_vector(x, dout + d);
        load_vector(y, o + d);
#pragma unroll
        for (int n = 0; n < VEC; ++n) sum += x[n] * y[n];
    }
    for (int offset = LANES / 2; offset > 0; offset /= 2)
        sum += __shfl_xor_sync(0xffffffff, sum, offset);
    if (threadIdx.x % LANES == 0 && i < p.seq_q)
        static_cast<float*>(p.workspace[0])[(int64_t(batch) * p.heads + head) * p.seq_q + i] = sum;
}

// dQ = scale dS K  [batch, heads, seq_q, HEAD_DIM]
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_dq(const __grid_constant__ BackwardParams p) {
    SharedMemory& smem = shared_memory<SharedMemory>();
    const int q_blocks = (p.seq_q + OWN - 1) / OWN;
    const int q_start = blockIdx.x % q_blocks * OWN;
    const int head = blockIdx.x / q_blocks % p.heads;
    const int batch = blockIdx.x / q_blocks / p.heads;
    const int kv_head = head / (p.heads / p.kv_heads);
    const Element* q =
        p.q + batch * p.q_stride.batch + head * p.q_stride.head + q_start * p.q_stride.row;
    const Element* dout = p.dout + batch * p.dout_stride.batch + head * p.dout_stride.head +
                          q_start * p.dout_stride.row;
    const Element* k = p.k + batch * p.k_stride.batch + kv_head * p.k_stride.head;
    const Element* v = p.v + batch * p.v_stride.batch + kv_head * p.v_stride.head;
    const int lane = threadIdx.x % LANES;
    const int row = threadIdx.x / LANES * ROWS;
    const int q_rows = min(OWN, p.seq_q - q_start);
    // Causal: query i sees the keys j <= i + offset, so the last query sees the last key.
    const int offset = p.seq_k - p.seq_q;
    const int block_keys = CAUSAL ? min(p.seq_k, q_start + q_rows + offset) : p.seq_k;
    const float scale_log2 = p.softmax_scale * LOG2_E;

    load_tile(smem.own_qk, q, p.q_stride.row, q_rows);
    load_tile(smem.own_dov, dout, p.dout_stride.row, q_rows);
    float lse[ROWS], delta[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int64_t i =
            (int64_t(batch) * p.heads + head) * p.seq_q + q_start + min(row + r, q_rows - 1);
        lse[r] = p.lse[i];
        delta[r] = static_cast<const float*>(p.workspace[0])[i];
    }

    Gradient dq = {};
    for (int k_start = 0; k_start < block_keys; k_start += OTHER) {
        __syncthreads();  // everyone has read the tiles of the round before
        load_tile(smem.other_qk, k + k_start * p.k_stride.row, p.k_stride.row, p.seq_k - k_start);
        load_tile(smem.other_dov, v + k_start * p.v_stride.row, p.v_stride.row, p.seq_k - k_start);
        __syncthreads();  // the tiles are complete

        // S = Q K^T, dP = dO V^T  [OWN, OTHER]
        float s[ROWS][COLS], dp[ROWS][COLS];
        multiply(s, smem.own_qk, smem.other_qk);
        multiply(dp, smem.own_dov, smem.other_dov);
        // dS = P * (dP - delta)
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < COLS; ++c) {
                const int key = k_start + lane + LANES * c;
                const int row_keys =
                    CAUSAL ? min(p.seq_k, q_start + row + r + offset + 1) : p.seq_k;
                const float p_rc = key < row_keys ? probability(s[r][c], scale_log2, lse[r]) : 0.0f;
                smem.ds[row + r][lane + LANES * c] = p_rc * (dp[r][c] - delta[r]);
            }
        __syncwarp();  // the rows of dS are complete
        // dQ += dS K  [OWN, HEAD_DIM]
        add_product(dq, smem.ds, smem.other_qk);
    }
    store_gradient(
        p.dq + batch * p.dq_stride.batch + head * p.dq_stride.head + q_start * p.dq_stride.row,
        p.dq_stride.row, q_rows, dq, p.softmax_scale);
}

// dK = scale dS^T Q, dV = P^T dO, summed over the query heads of a group
// [batch, kv_heads, seq_k, HEAD_DIM]
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_dk_dv(const __grid_constant__ BackwardParams p) {
    SharedMemory& smem = shared_memory<SharedMemory>();
    const int k_blocks = (p.seq_k + OWN - 1) / OWN;
    const int k_start = blockIdx.x % k_blocks * OWN;
    const int kv_head = blockIdx.x / k_blocks % p.kv_heads;
    const int batch = blockIdx.x / k_blocks / p.kv_heads;
    const Element* k =
        p.k + batch * p.k_stride.batch + kv_head * p.k_stride.head + k_start * p.k_stride.row;
    const Element* v =
        p.v + batch * p.v_stride.batch + kv_head * p.v_stride.head + k_start * p.v_stride.row;
    const int lane = threadIdx.x % LANES;
    const int row = threadIdx.x / LANES * ROWS;
    const int k_rows = min(OWN, p.seq_k - k_start);
    // Causal: key j is seen by the queries i >= j - offset.
    const int offset = p.seq_k - p.seq_q;
    const int first = CAUSAL ? max(0, k_start - offset) / OTHER * OTHER : 0;
    const float scale_log2 = p.softmax_scale * LOG2_E;

    load_tile(smem.own_qk, k, p.k_stride.row, k_rows);
    load_tile(smem.own_dov, v, p.v_stride.row, k_rows);

    Gradient dk = {}, dv = {};
    const int group = p.heads / p.kv_heads;
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const Element* q = p.q + batch * p.q_stride.batch + head * p.q_stride.head;
        const Element* dout = p.dout + batch * p.dout_stride.batch + head * p.dout_stride.head;
        const int64_t head_row = (int64_t(batch) * p.heads + head) * p.seq_q;
        for (int q_start = first; q_start < p.seq_q; q_start += OTHER) {
            const int q_rows = p.seq_q - q_start;
            __syncthreads();  // everyone has read the tiles of the round before
            load_tile(smem.other_qk, q + q_start * p.q_stride.row, p.q_stride.row, q_rows);
            load_tile(smem.other_dov, dout + q_start * p.dout_stride.row, p.dout_stride.row,
                      q_rows);
            if (threadIdx.x < OTHER) {
                const int64_t i = head_row + q_start + min(int(threadIdx.x), q_rows - 1);
                smem.lse[threadIdx.x] = p.lse[i];
                smem.delta[threadIdx.x] = static_cast<const float*>(p.workspace[0])[i];
            }
            __syncthreads();  // the tiles are complete

            // S^T = K Q^T, dP^T = V dO^T  [OWN, OTHER]
            float s[ROWS][COLS], dp[ROWS][COLS];
            multiply(s, smem.own_qk, smem.other_qk);
            multiply(dp, smem.own_dov, smem.other_dov);
            // dS = P * (dP - delta)
#pragma unroll
            for (int c = 0; c < COLS; ++c) {
                const int i = lane + LANES * c;
                const int row_keys = CAUSAL ? min(p.seq_k, q_start + i + offset + 1) : p.seq_k;
                const float lse = i < q_rows ? smem.lse[i] : -INFINITY;
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    const bool visible = k_start + row + r < row_keys;
                    const float p_rc = visible ? probability(s[r][c], scale_log2, lse) : 0.0f;
                    smem.p[row + r][i] = p_rc;
                    smem.ds[row + r][i] = p_rc * (dp[r][c] - smem.delta[i]);
                }
            }
            __syncwarp();  // the rows of P and dS are complete
            // dV += P^T dO, dK += dS^T Q  [OWN, HEAD_DIM]
            add_product(dv, smem.p, smem.other_dov);
            add_product(dk, smem.ds, smem.other_qk);
        }
    }
    store_gradient(
        p.dk + batch * p.dk_stride.batch + kv_head * p.dk_stride.head + k_start * p.dk_stride.row,
        p.dk_stride.row, k_rows, dk, p.softmax_scale);
    store_gradient(
        p.dv + batch * p.dv_stride.batch + kv_head * p.dv_stride.head + k_start * p.dv_stride.row,
        p.dv_stride.row, k_rows, dv, 1.0f);
}
