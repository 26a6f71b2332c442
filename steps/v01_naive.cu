// v01 -- naive: three kernels, one thread an output
// change: attention as a textbook writes it: S = Q K^T, P = softmax(S) and O = P V are three
//     kernels that hand each other [seq_q, seq_k] matrices through global memory
// why: a baseline that anyone can check by eye
// limits: bf16, fp16, fp32; head_dim 8-256 by 8; sm_75
//     needs 8 bytes of workspace for each of the batch * heads * seq_q * seq_k scores
#include "attention.cuh"

constexpr int TILE_N = 8;   // keys and
constexpr int TILE_M = 32;  // query rows of a block of attention_scores, one thread each
constexpr int ROWS = 4;     // query rows of a block of attention_output, HEAD_DIM threads each

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = sizeof(Element),
    .kernels = {{.name = "attention_scores",
                 .grid = {{SEQ_K, TILE_N}, {SEQ_Q, TILE_M}, {HEADS, 1}, {BATCH, 1}},
                 .threads = TILE_N * TILE_M},
                {.name = "attention_softmax",
                 .grid = {{SEQ_Q, 1}, {HEADS, 1}, {BATCH, 1}},
                 .threads = 32},
                {.name = "attention_output",
                 .grid = {{SEQ_Q, ROWS}, {HEADS, 1}, {BATCH, 1}},
                 .threads = HEAD_DIM * ROWS}},
    .workspace = {{.element_bytes = sizeof(float),
                   .shape = {{BATCH, 1}, {HEADS, 1}, {SEQ_Q, 1}, {SEQ_K, 1}}},
                  {.element_bytes = sizeof(float),
                   .shape = {{BATCH, 1}, {HEADS, 1}, {SEQ_Q, 1}, {SEQ_K, 1}}}},
};
}

// S = scale Q K^T, -inf where masked  [batch, heads, seq_q, seq_k]
extern "C" __global__ void attention_scores(const __grid_constant__ AttentionParams p) {
    int block = blockIdx.x;
    const int k_tiles = (p.seq_k + TILE_N - 1) / TILE_N;
    const int q_tiles = (p.seq_q + TILE_M - 1) / TILE_M;
    const int j = block % k_tiles * TILE_N + threadIdx.x % TILE_N;
    block /= k_tiles;
    const int i = block % q_tiles * TILE_M + threadIdx.x / TILE_N;
    block /= q_tiles;
    const int head = block % p.heads;
    const int batch = block / p.heads;
    const int kv_head = head / (p.heads / p.kv_heads);
    if (i >= p.seq_q || j >= p.seq_k) return;

    const Element* q = p.q + batch * p.q_stride.batch + head * p.q_stride.head + i * p.q_stride.row;
    const Element* k =
        p.k + batch * p.k_stride.batch + kv_head * p.k_stride.head + j * p.k_stride.row;
    float s = 0.0f;
    for (int d = 0; d < HEAD_DIM; ++d) s += to_float(q[d]) * to_float(k[d]);
    s *= p.softmax_scale;
    // Query i sees the keys j <= i + seq_k - seq_q: the last query sees the last key.
    if (CAUSAL && j > i + p.seq_k - p.seq_q) s = -INFINITY;

    float* scores = static_cast<float*>(p.workspace[0]);
    scores[((int64_t(batch) * p.heads + head) * p.seq_q + i) * p.seq_k + j] = s;
}

// The maximum (or sum) over the lanes of a warp, known to all of them.
template <typename Combine>
__device__ float warp_reduce(float x, Combine combine) {
    for (int offset = 16; offset > 0; offset /= 2)
        x = combine(x, __shfl_xor_sync(0xffffffff, x, offset));
    return x;
}

// P = exp(S - m) / l with m = max S and l = sum exp(S - m); lse = m + log l. One warp per row.
extern "C" __global__ void attention_softmax(const __grid_constant__ AttentionParams p) {
    const int lane = threadIdx.x;
    const int64_t row = blockIdx.x;  // of batch * heads * seq_q
    const float* s = static_cast<const float*>(p.workspace[0]) + row * p.seq_k;
    float* probability = static_cast<float*>(p.workspace[1]) + row * p.seq_k;

    float row_max = -INFINITY;
    for (int j = lane; j < p.seq_k; j += 32) row_max = fmaxf(row_max, s[j]);
    row_max = warp_reduce(row_max, [](float a, float b) { return fmaxf(a, b); });
    // A row with no visible key has m = -inf; exp(s - 0) = 0 there, where exp(-inf + inf) is NaN.
    const float shift = row_max == -INFINITY ? 0.0f : row_max;
    float row_sum = 0.0f;
    for (int j = lane; j < p.seq_k; j += 32) row_sum += expf(s[j] - shift);
    row_sum = warp_reduce(row_sum, [](float a, float b) { return a + b; });
    const float inverse = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
    for (int j = lane; j < p.seq_k; j += 32) probability[j] = expf(s[j] - shift) * inverse;
    if (lane == 0) p.lse[row] = shift + logf(row_sum);  // log 0 = -inf
}

// O = P V  [batch, heads, seq_q, HEAD_DIM]
extern "C" __global__ void __launch_bounds__(HEAD_DIM* ROWS)
    attention_output(const __grid_constant__ AttentionParams p) {
    const int q_blocks = (p.seq_q + ROWS - 1) / ROWS;
    const int d = threadIdx.x % HEAD_DIM;
    const int i = blockIdx.x % q_blocks * ROWS + threadIdx.x / HEAD_DIM;
    const int head = blockIdx.x / q_blocks % p.heads;
    const int batch = blockIdx.x / q_blocks / p.heads;
    if (i >= p.seq_q) return;
    const int kv_head = head / (p.heads / p.kv_heads);
    const float* probability = static_cast<const float*>(p.workspace[1]) +
                               ((int64_t(batch) * p.heads + head) * p.seq_q + i) * p.seq_k;
    const Element* v = p.v + batch * p.v_stride.batch + kv_head * p.v_stride.head + d;

    float o = 0.0f;
    for (int j = 0; j < p.seq_k; ++j) o += probability[j] * to_float(v[j * p.v_stride.row]);
    p.o[batch * p.o_stride.batch + head * p.o_stride.head + i * p.o_stride.row + d] =
        from_float<Element>(o);
}
