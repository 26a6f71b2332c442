// wmma -- matrices in every layout through one warp
// change: none; this is the kernel of verify/tests/test_wmma.py
// why: to see that the CPU twin of WMMA computes what a GPU does
// limits: bf16, fp16; head_dim 32-32 by 32; sm_80
#include <type_traits>

#include "wmma.cuh"

constexpr int SIDE = 16;

struct SharedMemory {
    alignas(32) float s[SIDE][SIDE + 4];
};

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_forward",
                 .grid = {{BATCH, 1}},
                 .threads = 32,
                 .smem_bytes = sizeof(SharedMemory)}},
};
}

using Accumulator = wmma::fragment<wmma::accumulator, SIDE, SIDE, SIDE, float>;

// acc + A B with A [SIDE, HEAD_DIM] and B [HEAD_DIM, SIDE]
template <typename LayoutA, typename LayoutB>
__device__ Accumulator multiply(Accumulator acc, const Element* a, int64_t a_pitch,
                                const Element* b, int64_t b_pitch) {
    const int64_t a_step = std::is_same_v<LayoutA, wmma::row_major> ? 1 : a_pitch;
    const int64_t b_step = std::is_same_v<LayoutB, wmma::col_major> ? 1 : b_pitch;
    for (int d = 0; d < HEAD_DIM; d += SIDE) {
        wmma::fragment<wmma::matrix_a, SIDE, SIDE, SIDE, Element, LayoutA> a_frag;
        wmma::fragment<wmma::matrix_b, SIDE, SIDE, SIDE, Element, LayoutB> b_frag;
        wmma::load_matrix_sync(a_frag, a + d * a_step, a_pitch);
        wmma::load_matrix_sync(b_frag, b + d * b_step, b_pitch);
        wmma::mma_sync(acc, a_frag, b_frag, acc);
    }
    return acc;
}

// lse [6, SIDE, SIDE]: products of corners of Q, K and V [HEAD_DIM, HEAD_DIM].
extern "C" __global__ void attention_forward(const __grid_constant__ AttentionParams p) {
    using wmma::row_major, wmma::col_major;
    SharedMemory& smem = shared_memory<SharedMemory>();
    const int64_t q_pitch = p.q_stride.row;
    const int64_t k_pitch = p.k_stride.row;
    const int64_t v_pitch = p.v_stride.row;
    const auto result = [&](int i) { return p.lse + i * SIDE * SIDE; };
    Accumulator zero;
    wmma::fill_fragment(zero, 0.0f);

    // S = Q K^T, Q V, Q^T K^T and Q^T V
    const Accumulator s = multiply<row_major, col_major>(zero, p.q, q_pitch, p.k, k_pitch);
    const Accumulator qv = multiply<row_major, row_major>(zero, p.q, q_pitch, p.v, v_pitch);
    const Accumulator qt_kt = multiply<col_major, col_major>(zero, p.q, q_pitch, p.k, k_pitch);
    const Accumulator qt_v = multiply<col_major, row_major>(zero, p.q, q_pitch, p.v, v_pitch);
    wmma::store_matrix_sync(result(0), s, SIDE, wmma::mem_row_major);
    wmma::store_matrix_sync(result(1), qv, SIDE, wmma::mem_row_major);
    wmma::store_matrix_sync(result(2), qt_kt, SIDE, wmma::mem_row_major);
    wmma::store_matrix_sync(result(3), qt_v, SIDE, wmma::mem_row_major);
    // (Q V)^T
    wmma::store_matrix_sync(result(4), qv, SIDE, wmma::mem_col_major);

    // S^T + Q V, times S^T element by element: equal fragments have equal layouts.
    wmma::store_matrix_sync(smem.s[0], s, SIDE + 4, wmma::mem_row_major);
    __syncwarp();  // S is complete
    Accumulator s_t, acc;
    wmma::load_matrix_sync(s_t, smem.s[0], SIDE + 4, wmma::mem_col_major);
    acc = s_t;
    acc = multiply<row_major, row_major>(acc, p.q, q_pitch, p.v, v_pitch);
    for (int i = 0; i < acc.num_elements; ++i) acc.x[i] *= s_t.x[i];
    wmma::store_matrix_sync(result(5), acc, SIDE, wmma::mem_row_major);
}
