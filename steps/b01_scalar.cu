// b01 -- scalar: three kernels, one thread a row of each gradient
// change: the gradients as they are derived: a kernel for delta, one for dQ with a thread a query
//     row, one for dK and dV with a thread a key row; P is computed again from Q, K and lse
// why: a baseline that anyone can check by eye
// limits: bf16, fp16, fp32; head_dim 8-256 by 8; sm_75
//     dK and dV take four vectors of head_dim floats a thread: what registers do not hold is spilled
#include "backward.cuh"

constexpr int NUM_THREADS = 64;

extern "C" {
__constant__ BackwardDescriptor launch_descriptor = {
    .alignment = sizeof(Element),
    .kernels = {{.name = "attention_delta",
                 .grid = {{SEQ_Q, NUM_THREADS}, {HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS},
                {.name = "attention_dq",
                 .grid = {{SEQ_Q, NUM_THREADS}, {HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS},
                {.name = "attention_dk_dv",
                 .grid = {{SEQ_K, NUM_THREADS}, {KV_HEADS, 1}, {BATCH, 1}},
                 .threads = NUM_THREADS}},
    .workspace = {{.element_bytes = sizeof(float),  // delta
                   .shape = {{BATCH, 1}, {HEADS, 1}, {SEQ_Q, 1}}}},
};
}

// x = row  [HEAD_DIM]
__device__ void load_row(float (&x)[HEAD_DIM], const Element* row) {
#pragma unroll
    for (int d = 0; d < HEAD_DIM; ++d) x[d] = to_float(row[d]);
}

__device__ void store_row(Element* row, const float (&x)[HEAD_DIM], float factor) {
#pragma unroll
    for (int d = 0; d < HEAD_DIM; ++d) row[d] = from_float<Element>(factor * x[d]);
}

__device__ float dot(const float (&x)[HEAD_DIM], const Element* row) {
    float sum = 0.0f;
#pragma unroll
    for (int d = 0; d < HEAD_DIM; ++d) sum += x[d] * to_float(row[d]);
    return sum;
}

// x += factor row
__device__ void add_row(float (&x)[HEAD_DIM], float factor, const Element* row) {
#pragma unroll
    for (int d = 0; d < HEAD_DIM; ++d) x[d] += factor * to_float(row[d]);
}

// P = exp(S - lse), 0 in a row that sees no key: its lse is -inf.
__device__ float probability(float s, float lse) { return lse == -INFINITY ? 0.0f : expf(s - lse); }

// delta = rowsum(dO * O)  [batch, heads, seq_q]
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_delta(const __grid_constant__ BackwardParams p) {
    const int q_blocks = (p.seq_q + NUM_THREADS - 1) / NUM_THREADS;
    const int i = blockIdx.x % q_blocks * NUM_THREADS + threadIdx.x;
    const int head = blockIdx.x / q_blocks % p.heads;
    const int batch = blockIdx.x / q_blocks / p.heads;
    if (i >= p.seq_q) return;

    const Element* o = p.o + batch * p.o_stride.batch + head * p.o_stride.head + i * p.o_stride.row;
    const Element* dout =
        p.dout + batch * p.dout_stride.batch + head * p.dout_stride.head + i * p.dout_stride.row;
    float sum = 0.0f;
    for (int d = 0; d < HEAD_DIM; ++d) sum += to_float(dout[d]) * to_float(o[d]);
    static_cast<float*>(p.workspace[0])[(int64_t(batch) * p.heads + head) * p.seq_q + i] = sum;
}

// dS = P * (dP - delta), dQ = scale dS K  [batch, heads, seq_q, HEAD_DIM]
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_dq(const __grid_constant__ BackwardParams p) {
    const int q_blocks = (p.seq_q + NUM_THREADS - 1) / NUM_THREADS;
    const int i = blockIdx.x % q_blocks * NUM_THREADS + threadIdx.x;
    const int head = blockIdx.x / q_blocks % p.heads;
    const int batch = blockIdx.x / q_blocks / p.heads;
    if (i >= p.seq_q) return;
    const int kv_head = head / (p.heads / p.kv_heads);
    const Element* k = p.k + batch * p.k_stride.batch + kv_head * p.k_stride.head;
    const Element* v = p.v + batch * p.v_stride.batch + kv_head * p.v_stride.head;

    float q[HEAD_DIM], dout[HEAD_DIM], dq[HEAD_DIM] = {};
    load_row(q, p.q + batch * p.q_stride.batch + head * p.q_stride.head + i * p.q_stride.row);
    load_row(dout, p.dout + batch * p.dout_stride.batch + head * p.dout_stride.head +
                       i * p.dout_stride.row);
    const int64_t row = (int64_t(batch) * p.heads + head) * p.seq_q + i;
    const float lse = p.lse[row];
    const float delta = static_cast<const float*>(p.workspace[0])[row];

    // Query i sees the keys j <= i + seq_k - seq_q: the last query sees the last key.
    const int visible = CAUSAL ? max(0, min(p.seq_k, i + 1 + p.seq_k - p.seq_q)) : p.seq_k;
    for (int j = 0; j < visible; ++j) {
        const float probability_ij = probability(p.softmax_scale * dot(q, k), lse);
        add_row(dq, probability_ij * (dot(dout, v) - delta), k);
        k += p.k_stride.row;
        v += p.v_stride.row;
    }
    store_row(p.dq + batch * p.dq_stride.batch + head * p.dq_stride.head + i * p.dq_stride.row, dq,
              p.softmax_scale);
}

// dK = scale dS^T Q, dV = P^T dO, summed over the query heads of a group
// [batch, kv_heads, seq_k, HEAD_DIM]
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_dk_dv(const __grid_constant__ BackwardParams p) {
    const int k_blocks = (p.seq_k + NUM_THREADS - 1) / NUM_THREADS;
    const int j = blockIdx.x % k_blocks * NUM_THREADS + threadIdx.x;
    const int kv_head = blockIdx.x / k_blocks % p.kv_heads;
    const int batch = blockIdx.x / k_blocks / p.kv_heads;
    if (j >= p.seq_k) return;

    float k[HEAD_DIM], v[HEAD_DIM], dk[HEAD_DIM] = {}, dv[HEAD_DIM] = {};
    load_row(k, p.k + batch * p.k_stride.batch + kv_head * p.k_stride.head + j * p.k_stride.row);
    load_row(v, p.v + batch * p.v_stride.batch + kv_head * p.v_stride.head + j * p.v_stride.row);

    // Key j is seen by the queries i >= j + seq_q - seq_k.
    const int first = CAUSAL ? max(0, j + p.seq_q - p.seq_k) : 0;
    const int group = p.heads / p.kv_heads;
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const int64_t row = (int64_t(batch) * p.heads + head) * p.seq_q;
        const float* lse = p.lse + row;
        const float* delta = static_cast<const float*>(p.workspace[0]) + row;
        const Element* q = p.q + batch * p.q_stride.batch + head * p.q_stride.head;
        const Element* dout = p.dout + batch * p.dout_stride.batch + head * p.dout_stride.head;
        for (int i = first; i < p.seq_q; ++i) {
            const Element* q_row = q + i * p.q_stride.row;
            const Element* dout_row = dout + i * p.dout_stride.row;
            const float probability_ij = probability(p.softmax_scale * dot(k, q_row), lse[i]);
            add_row(dv, probability_ij, dout_row);
            add_row(dk, probability_ij * (dot(v, dout_row) - delta[i]), q_row);
        }
    }
    store_row(p.dk + batch * p.dk_stride.batch + kv_head * p.dk_stride.head + j * p.dk_stride.row,
              dk, p.softmax_scale);
    store_row(p.dv + batch * p.dv_stride.batch + kv_head * p.dv_stride.head + j * p.dv_stride.row,
              dv, 1.0f);
}
