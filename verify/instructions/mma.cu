// mma -- fragments through ldmatrix, mma.sync, cvt, ex2 and lg2
// change: none; this is the kernel of verify/tests/test_mma.py
// why: to see that the CPU twins of the instructions compute what a GPU does
// limits: bf16, fp16; head_dim 256-256 by 8; sm_80
#include "copy.cuh"
#include "mma.cuh"

struct SharedMemory {
    Element rows[32][2 * VEC];  // of four 8x8 matrices, with gaps
};

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_forward",
                 .grid = {{SEQ_Q, 1}},
                 .threads = 32,
                 .smem_bytes = sizeof(SharedMemory)}},
};
}

// From row i of q, k and v to lse [seq_q, 21, 32], where the last axis is the lanes:
//     q    A [4, 32] registers, also the four matrices [32, 8] elements
//     k    B [2, 32] registers; lo, hi [2, 32] floats
//     v    C [4, 32] floats
//     lse  ldmatrix_x4 [4], ldmatrix_x4_trans [4], A B + C [4], cvt_rn_x2 of lo and hi, 2^C [4],
//          log2 C [4]
extern "C" __global__ void attention_forward(const __grid_constant__ AttentionParams p) {
    SharedMemory& smem = shared_memory<SharedMemory>();
    const int lane = threadIdx.x;
    const int64_t row = blockIdx.x;
    const Element* q = p.q + row * p.q_stride.row;
    const auto* a_words = reinterpret_cast<const uint32_t*>(q) + lane;
    const auto* b_words = reinterpret_cast<const uint32_t*>(p.k + row * p.k_stride.row) + lane;
    const auto* floats = reinterpret_cast<const float*>(b_words + 64);
    const auto* c_floats = reinterpret_cast<const float*>(p.v + row * p.v_stride.row) + lane;
    float* result = p.lse + row * 21 * 32 + lane;
    const auto write = [&](auto x) {
        memcpy(result, &x, sizeof(*result));
        result += 32;
    };

    store_uint4(smem.rows[lane], load_uint4(q + lane * VEC));
    __syncwarp();  // the matrices are complete
    const Element* named = smem.rows[(5 * lane + 3) % 32];
    uint32_t plain[4], transposed[4];
    ldmatrix_x4(plain, named);
    ldmatrix_x4_trans(transposed, named);
    for (uint32_t x : plain) write(x);
    for (uint32_t x : transposed) write(x);

    uint32_t a[4];
    float d[4];
    for (int i = 0; i < 4; ++i) {
        a[i] = a_words[32 * i];
        d[i] = c_floats[32 * i];
    }
    mma_m16n8k16<Element>(d, a, b_words[0], b_words[32]);
    for (float x : d) write(x);

    write(cvt_rn_x2<Element>(floats[0], floats[32]));
    for (int i = 0; i < 4; ++i) write(ex2_approx_ftz(c_floats[32 * i]));
    for (int i = 0; i < 4; ++i) write(lg2_approx_ftz(c_floats[32 * i]));
}
