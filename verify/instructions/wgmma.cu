// wgmma -- products of every size and layout
// change: none; this is the kernel of verify/tests/test_wgmma.py
// why: to see that the CPU twins of the instructions compute what a GPU does
// limits: bf16, fp16; head_dim 256-256 by 8; sm_90a
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int K = 32;          // two wgmma
constexpr int GAP = 1024 / 2;  // elements between panels, so that no two strides are alike

struct alignas(1024) SharedMemory {
    Element a[8 * (K * 8 + GAP)];  // as long as the longest layout
    Element b[32 * (K * 8 + GAP)];
};

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_forward",
                 .grid = {{SEQ_Q, 8}},
                 .threads = 128,
                 .smem_bytes = sizeof(SharedMemory)}},
};
}

// A matrix [size, K] in shared memory, size along M or N: rows along the major axis, of as many bytes
// as the swizzle has, and beside each other panels of such rows.
struct Operand {
    Element* start;
    int size;
    Major major;
    int swizzle;

    __device__ int row() const { return 16 << swizzle; }
    __device__ int panel() const { return (major == K_MAJOR ? size : K) * row() + 2 * GAP; }

    // Element (i, k).
    __device__ Element& at(int i, int k) const {
        const int line = major == K_MAJOR ? i : k, byte = 2 * (major == K_MAJOR ? k : i);
        const int linear = byte / row() * panel() + line * row() + byte % row();
        return start[(linear ^ (linear / 128 % (row() / 16) * 16)) / 2];
    }
    // Of the columns k to k + 15.
    __device__ uint64_t descriptor(int k) const {
        const int byte = 2 * k;
        const Element* first =
            start + (major == K_MAJOR ? byte / row() * panel() + byte % row() : k * row()) / 2;
        switch (swizzle) {
            case SWIZZLE_NONE:
                if (major == K_MAJOR)
                    return matrix_descriptor<SWIZZLE_NONE>(first, panel(), 8 * row());
                return matrix_descriptor<SWIZZLE_NONE>(first, 8 * row(), panel());
            case SWIZZLE_32B:
                return matrix_descriptor<SWIZZLE_32B>(first, panel(), 8 * row());
            case SWIZZLE_64B:
                return matrix_descriptor<SWIZZLE_64B>(first, panel(), 8 * row());
            default:
                return matrix_descriptor<SWIZZLE_128B>(first, panel(), 8 * row());
        }
    }
};

enum Source { A_K_MAJOR, A_MN_MAJOR, A_REGISTERS };

constexpr __device__ Source source_of(int n) { return static_cast<Source>(n / 16 % 3); }

// What a product is made of, beside its shapes.
struct Product {
    Operand a, b;
    const Element* a_global;  // [64, K]
    const Element* c;         // [64, 256]
    bool accumulate;
    float* result;  // [64, 256]
};

// D (+)= A B for a D [64, N] that holds C.
template <int N, Source SOURCE, Major B_MAJOR>
__device__ void multiply(const Product& p) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, col = threadIdx.x % 4 * 2;
    uint32_t a_frag[K / 16][4];
    float d[N / 8][4];
#pragma unroll
    for (int k = 0; k < K / 16; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            memcpy(&a_frag[k][i], &p.a_global[(row + i % 2 * 8) * K + 16 * k + col + i / 2 * 8], 4);
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            d[j][i] = to_float(p.c[(row + i / 2 * 8) * HEAD_DIM + 8 * j + col + i % 2]);
    wgmma_fence(d, a_frag);
#pragma unroll
    for (int k = 0; k < K; k += 16) {
        const uint64_t b = p.b.descriptor(k);
        const bool add = p.accumulate || k > 0;
        if constexpr (SOURCE == A_REGISTERS)
            wgmma_m64nNk16<Element, B_MAJOR>(d, a_frag[k / 16], b, add);
        else
            wgmma_m64nNk16<Element, SOURCE == A_K_MAJOR ? K_MAJOR : MN_MAJOR, B_MAJOR>(
                d, p.a.descriptor(k), b, add);
    }
    wgmma_commit_group();
    wgmma_wait_group<0>(d, a_frag);
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            p.result[(row + i / 2 * 8) * HEAD_DIM + 8 * j + col + i % 2] = d[j][i];
}

// Of the product's size.
template <int N>
__device__ void multiply_n(const Product& p) {
    if (p.b.size != N) {
        if constexpr (N < 256) multiply_n<N + 16>(p);
    } else if (p.b.major == K_MAJOR) {
        multiply<N, source_of(N), K_MAJOR>(p);
    } else {
        multiply<N, source_of(N), MN_MAJOR>(p);
    }
}

// Block i of 128 has a size and a layout of its own:
//     q    A [64, K], in its 8 rows
//     k    B [K, 256]
//     v    C [64, 256]
//     lse  D [blocks, 64, 256]
extern "C" __global__ void __launch_bounds__(128, 1)
    attention_forward(const __grid_constant__ AttentionParams p) {
    SharedMemory& smem = shared_memory<SharedMemory>();
    const int block = blockIdx.x, t = threadIdx.x;
    const int n = 16 + 16 * (block % 16), swizzle = block / 16 % 4;
    const bool accumulate = (block + block / 16 + block / 64) % 2;
    const Operand a = {smem.a, 64, source_of(n) == A_MN_MAJOR ? MN_MAJOR : K_MAJOR,
                       (block + swizzle) % 4};
    const Operand b = {smem.b, n, block < 64 ? K_MAJOR : MN_MAJOR, swizzle};

    const Element* a_global = p.q + int64_t(block) * 64 * K;
    for (int i = t; i < 64 * K; i += 128) a.at(i / K, i % K) = a_global[i];
    for (int i = t; i < n * K; i += 128) b.at(i % n, i / n) = p.k[i / n * HEAD_DIM + i % n];
    fence_proxy_async();
    __syncthreads();  // A and B are complete
    float* result = p.lse + int64_t(block) * 64 * HEAD_DIM;
    multiply_n<16>({a, b, a_global, p.v, accumulate, result});
}
