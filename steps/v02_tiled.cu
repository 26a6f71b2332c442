// v02 -- tiled: shared-memory tiles, vector loads, one softmax kernel
// change: both products work on tiles in shared memory, which the block loads 16 bytes per
//     thread, coalesced; a thread computes STRIP outputs of a column; scale, mask, softmax and
//     conversion are one kernel, one block per row
// why: v01 issues two loads for each multiplication, and in attention_scores a load touches up to 8
//     cache lines. Here a multiplication takes 17/16 words from shared memory, which delivers 32 a
//     clock: 16 TFLOP/s, 7 times v01
// limits: bf16, fp16, fp32; head_dim 8-256 by 8; sm_75
//     needs 6 bytes of workspace (8 with fp32) for each of the batch * heads * seq_q * seq_k scores
#include "attention.cuh"

constexpr int STRIP = 16;  // outputs of a thread: one operand from shared memory serves them all

// attention_scores: S tile [TILE_M, TILE_N], TILE_D of the head dimension at a time.
constexpr int TILE_M = 64;
constexpr int TILE_N = 64;
constexpr int TILE_D = HEAD_DIM % 32 == 0 ? 32 : HEAD_DIM % 16 == 0 ? 16 : 8;
constexpr int SCORES_THREADS = TILE_N * (TILE_M / STRIP);

// attention_output: O tile [ROWS, HEAD_DIM], KEYS keys at a time.
constexpr int ROWS = 32;
constexpr int KEYS = 32;
constexpr int OUTPUT_THREADS = HEAD_DIM * (ROWS / STRIP);

constexpr int SOFTMAX_THREADS = 256;
constexpr int SOFTMAX_WARPS = SOFTMAX_THREADS / 32;

// Rows are padded by 4 floats: eight lanes that each read 16 bytes from eight consecutive rows then
// touch all 32 banks once.
struct ScoresTiles {
    float q[TILE_M][TILE_D + 4];
    float k[TILE_N][TILE_D + 4];
};
struct OutputTiles {
    float p[ROWS][KEYS];
    float v[KEYS][HEAD_DIM];
};
struct Reduction {
    float warp[SOFTMAX_WARPS];
};

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_scores",
                 .grid = {{SEQ_K, TILE_N}, {SEQ_Q, TILE_M}, {HEADS, 1}, {BATCH, 1}},
                 .threads = SCORES_THREADS,
                 .smem_bytes = sizeof(ScoresTiles)},
                {.name = "attention_softmax",
                 .grid = {{SEQ_Q, 1}, {HEADS, 1}, {BATCH, 1}},
                 .threads = SOFTMAX_THREADS,
                 .smem_bytes = sizeof(Reduction)},
                {.name = "attention_output",
                 .grid = {{SEQ_Q, ROWS}, {HEADS, 1}, {BATCH, 1}},
                 .threads = OUTPUT_THREADS,
                 .smem_bytes = sizeof(OutputTiles)}},
    .workspace = {{.element_bytes = sizeof(float),  // S
                   .shape = {{BATCH, 1}, {HEADS, 1}, {SEQ_Q, 1}, {SEQ_K, TILE_N}}},
                  {.element_bytes = sizeof(Element),  // P
                   .shape = {{BATCH, 1}, {HEADS, 1}, {SEQ_Q, 1}, {SEQ_K, TILE_N}}}},
};
}

// Rows of S and P are whole tiles long, so that each starts on a 16-byte boundary.
__device__ int64_t row_pitch(const AttentionParams& p) {
    return int64_t(p.seq_k + TILE_N - 1) / TILE_N * TILE_N;
}

// The keys that query row i sees: j < visible_keys(i). Causal: the last query sees the last key.
__device__ int visible_keys(const AttentionParams& p, int i) {
    return CAUSAL ? max(0, min(p.seq_k, i + 1 + p.seq_k - p.seq_q)) : p.seq_k;
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

// tile[r][c] = rows[r][c]  [TILE_ROWS, COLS]
template <int TILE_ROWS, int COLS, int THREADS, int PITCH>
__device__ void load_tile(float (&tile)[TILE_ROWS][PITCH], const Element* rows, int64_t stride,
                          int num_rows) {
    constexpr int VECTORS = TILE_ROWS * (COLS / VEC);
#pragma unroll 8
    for (int start = 0; start < VECTORS; start += THREADS) {
        const int n = start + threadIdx.x;
        const int r = n / (COLS / VEC);
        const int c = n % (COLS / VEC) * VEC;
        if (VECTORS % THREADS != 0 && n >= VECTORS) break;
        float x[VEC];
        load_row(x, rows, stride, num_rows, r, c);
#pragma unroll
        for (int i = 0; i < VEC; i += 4)
            store_float4(&tile[r][c + i], make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]));
    }
}

// S = Q K^T  [batch, heads, seq_q, row_pitch]
extern "C" __global__ void __launch_bounds__(SCORES_THREADS)
    attention_scores(const __grid_constant__ AttentionParams p) {
    ScoresTiles& tile = shared_memory<ScoresTiles>();
    int block = blockIdx.x;
    const int k_tiles = (p.seq_k + TILE_N - 1) / TILE_N;
    const int q_tiles = (p.seq_q + TILE_M - 1) / TILE_M;
    const int k_start = block % k_tiles * TILE_N;
    block /= k_tiles;
    const int q_start = block % q_tiles * TILE_M;
    block /= q_tiles;
    const int head = block % p.heads;
    const int batch = block / p.heads;
    const int kv_head = head / (p.heads / p.kv_heads);
    const int q_rows = min(TILE_M, p.seq_q - q_start);
    const int k_rows = min(TILE_N, p.seq_k - k_start);
    if (k_start >= visible_keys(p, q_start + q_rows - 1))
        return;  // no query of the tile sees a key

    const Element* q =
        p.q + batch * p.q_stride.batch + head * p.q_stride.head + q_start * p.q_stride.row;
    const Element* k =
        p.k + batch * p.k_stride.batch + kv_head * p.k_stride.head + k_start * p.k_stride.row;
    const int col = threadIdx.x % TILE_N;
    const int row = threadIdx.x / TILE_N * STRIP;

    float s[STRIP] = {};
    for (int d_start = 0; d_start < HEAD_DIM; d_start += TILE_D) {
        __syncthreads();  // everyone has read the tiles of the round before
        load_tile<TILE_M, TILE_D, SCORES_THREADS>(tile.q, q + d_start, p.q_stride.row, q_rows);
        load_tile<TILE_N, TILE_D, SCORES_THREADS>(tile.k, k + d_start, p.k_stride.row, k_rows);
        __syncthreads();  // the tiles are complete
#pragma unroll
        for (int d = 0; d < TILE_D; d += 4) {
            const float4 b = load_float4(&tile.k[col][d]);
#pragma unroll
            for (int i = 0; i < STRIP; ++i) {
                const float4 a = load_float4(&tile.q[row + i][d]);  // the same for the whole warp
                s[i] += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
            }
        }
    }

    const int64_t pitch = row_pitch(p);
    float* scores = static_cast<float*>(p.workspace[0]) +
                    ((int64_t(batch) * p.heads + head) * p.seq_q + q_start + row) * pitch +
                    k_start + col;
#pragma unroll
    for (int i = 0; i < STRIP; ++i)
        if (row + i < q_rows) scores[i * pitch] = s[i];
}

// The maximum (or sum) of x over the block, known to all its threads.
template <typename Combine>
__device__ float block_reduce(Reduction& reduction, float x, Combine combine) {
    for (int offset = 16; offset > 0; offset /= 2)
        x = combine(x, __shfl_xor_sync(0xffffffff, x, offset));
    __syncthreads();  // everyone has read the reduction before this one
    if (threadIdx.x % 32 == 0) reduction.warp[threadIdx.x / 32] = x;
    __syncthreads();  // every warp's part is there
    x = reduction.warp[0];
    for (int warp = 1; warp < SOFTMAX_WARPS; ++warp) x = combine(x, reduction.warp[warp]);
    return x;
}

// P = softmax(scale S + mask) in the input's type; lse  [batch, heads, seq_q, row_pitch]
extern "C" __global__ void __launch_bounds__(SOFTMAX_THREADS)
    attention_softmax(const __grid_constant__ AttentionParams p) {
    Reduction& reduction = shared_memory<Reduction>();
    const int64_t row = blockIdx.x;  // of batch * heads * seq_q
    const int visible = visible_keys(p, row % p.seq_q);
    const float* scores = static_cast<const float*>(p.workspace[0]) + row * row_pitch(p);
    Element* probabilities = static_cast<Element*>(p.workspace[1]) + row * row_pitch(p);
    // exp(scale s) = 2^(scale_log2 s): the hardware's exponential has base 2.
    const float scale_log2 = p.softmax_scale * LOG2_E;

    float row_max = -INFINITY;
    for (int j = threadIdx.x; j < visible; j += SOFTMAX_THREADS)
        row_max = fmaxf(row_max, scores[j] * scale_log2);
    row_max = block_reduce(reduction, row_max, [](float a, float b) { return fmaxf(a, b); });
    // A row with no visible key has m = -inf; exp(s - 0) = 0 there, where exp(-inf + inf) is NaN.
    const float shift = row_max == -INFINITY ? 0.0f : row_max;
    float row_sum = 0.0f;
    for (int j = threadIdx.x; j < visible; j += SOFTMAX_THREADS)
        row_sum += exp2f(scores[j] * scale_log2 - shift);
    row_sum = block_reduce(reduction, row_sum, [](float a, float b) { return a + b; });
    const float inverse = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;

    for (int start = threadIdx.x * VEC; start < row_pitch(p); start += SOFTMAX_THREADS * VEC) {
        float x[VEC];
#pragma unroll
        for (int i = 0; i < VEC; i += 4) {
            // S may not have been written beyond the last visible key.
            const float4 s = start < visible ? load_float4(&scores[start + i]) : float4{};
            x[i] = s.x, x[i + 1] = s.y, x[i + 2] = s.z, x[i + 3] = s.w;
        }
#pragma unroll
        for (int i = 0; i < VEC; ++i)
            x[i] = start + i < visible ? exp2f(x[i] * scale_log2 - shift) * inverse : 0.0f;
        store_vector(&probabilities[start], x);
    }
    if (threadIdx.x == 0) p.lse[row] = shift * LN_2 + logf(row_sum);
}

// O = P V  [batch, heads, seq_q, HEAD_DIM]
extern "C" __global__ void __launch_bounds__(OUTPUT_THREADS)
    attention_output(const __grid_constant__ AttentionParams p) {
    OutputTiles& tile = shared_memory<OutputTiles>();
    const int q_blocks = (p.seq_q + ROWS - 1) / ROWS;
    const int q_start = blockIdx.x % q_blocks * ROWS;
    const int head = blockIdx.x / q_blocks % p.heads;
    const int batch = blockIdx.x / q_blocks / p.heads;
    const int kv_head = head / (p.heads / p.kv_heads);
    const int q_rows = min(ROWS, p.seq_q - q_start);
    const int visible = visible_keys(p, q_start + q_rows - 1);

    const int64_t pitch = row_pitch(p);
    const Element* probabilities = static_cast<const Element*>(p.workspace[1]) +
                                   ((int64_t(batch) * p.heads + head) * p.seq_q + q_start) * pitch;
    const Element* v = p.v + batch * p.v_stride.batch + kv_head * p.v_stride.head;
    const int d = threadIdx.x % HEAD_DIM;
    const int row = threadIdx.x / HEAD_DIM * STRIP;

    float o[STRIP] = {};
    for (int k_start = 0; k_start < visible; k_start += KEYS) {
        __syncthreads();  // everyone has read the tiles of the round before
        load_tile<ROWS, KEYS, OUTPUT_THREADS>(tile.p, probabilities + k_start, pitch, q_rows);
        load_tile<KEYS, HEAD_DIM, OUTPUT_THREADS>(tile.v, v + k_start * p.v_stride.row,
                                                  p.v_stride.row, min(KEYS, p.seq_k - k_start));
        __syncthreads();  // the tiles are complete
#pragma unroll
        for (int j = 0; j < KEYS; j += 4) {
            const float b[4] = {tile.v[j][d], tile.v[j + 1][d], tile.v[j + 2][d], tile.v[j + 3][d]};
#pragma unroll
            for (int i = 0; i < STRIP; ++i) {
                const float4 a = load_float4(&tile.p[row + i][j]);  // the same for the whole row
                o[i] += a.x * b[0] + a.y * b[1] + a.z * b[2] + a.w * b[3];
            }
        }
    }

    Element* output = p.o + batch * p.o_stride.batch + head * p.o_stride.head + d;
#pragma unroll
    for (int i = 0; i < STRIP; ++i)
        if (row + i < q_rows)
            output[(q_start + row + i) * p.o_stride.row] = from_float<Element>(o[i]);
}
