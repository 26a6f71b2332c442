// tma -- boxes of a tensor through TMA, and matrices through stmatrix
// change: none; this is the kernel of verify/tests/test_tma.py
// why: to see that the CPU twins of the instructions compute what a GPU does
// limits: bf16, fp16; head_dim 64-88 by 8; sm_90
#include "mma.cuh"
#include "tma.cuh"

constexpr Swizzle SWIZZLE = Swizzle(HEAD_DIM / 8 % 4);                // a head_dim for each
constexpr int COLUMNS = SWIZZLE == SWIZZLE_NONE ? 24 : 8 << SWIZZLE;  // the swizzle's width
constexpr int ROWS = 12;                                              // not a whole pattern

struct alignas(1024) SharedMemory {
    alignas(1024) Element loaded[ROWS * COLUMNS];
    alignas(1024) Element stored[ROWS * COLUMNS];
    alignas(1024) Element matrices[32 * 8];
    Mbarrier full;
};

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_forward", .threads = 64, .smem_bytes = sizeof(SharedMemory)}},
    .q_box = {ROWS, COLUMNS, SWIZZLE},
    .o_box = {ROWS, COLUMNS, SWIZZLE},
};
}

// One block, as boxes may overlap. It copies a box from q to the same place in o, which no box may
// begin before. Where box i is say the first integers of row i of k: d, row, head, batch. What lies
// in shared memory goes to lse [seq_k, words] as it is: the box, then four matrices that a warp has
// stored. The last word is how many of the box's elements o lacks when the wait for the store ends.
extern "C" __global__ void attention_forward(const __grid_constant__ AttentionParams p) {
    constexpr int BOX_WORDS = ROWS * COLUMNS / 2, MATRIX_WORDS = 32 * 8 / 2;
    SharedMemory& smem = shared_memory<SharedMemory>();
    const int lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        mbarrier_init(smem.full, 1);
        fence_mbarrier_init();
    }
    __syncthreads();  // the mbarrier is initialized
    for (int box = 0; box < p.seq_k; ++box) {
        const auto* place = reinterpret_cast<const int16_t*>(p.k + box * p.k_stride.row);
        float* words = p.lse + int64_t(box) * (BOX_WORDS + MATRIX_WORDS + 1);
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect_tx(smem.full, sizeof(smem.loaded));
            cp_async_bulk_tensor_load(smem.loaded, p.q_map, place[0], place[1], place[2], place[3],
                                      smem.full);
        }
        while (!mbarrier_try_wait_parity(smem.full, box % 2)) {
        }
        for (int i = threadIdx.x; i < BOX_WORDS; i += 64)
            memcpy(words + i, &smem.loaded[2 * i], sizeof(float));

        for (int i = threadIdx.x; i < ROWS * COLUMNS; i += 64) smem.stored[i] = smem.loaded[i];
        fence_proxy_async();
        __syncthreads();  // the box is there, and each thread has fenced
        float missing = 0;
        if (threadIdx.x == 0 && min(min(place[0], place[1]), min(place[2], place[3])) >= 0) {
            cp_async_bulk_tensor_store(p.o_map, place[0], place[1], place[2], place[3],
                                       smem.stored);
            cp_async_bulk_commit_group();
            cp_async_bulk_wait_group<0>();
            const auto at = [&](const Element* tensor, const Strides& stride, int row, int d) {
                return to_float(tensor[place[3] * stride.batch + place[2] * stride.head +
                                       row * stride.row + d]);
            };
            const bool inside = place[2] < p.heads && place[3] < p.batch;
            for (int row = place[1]; inside && row < min(place[1] + ROWS, p.seq_q); ++row)
                for (int d = place[0]; d < min(place[0] + COLUMNS, HEAD_DIM); ++d)
                    missing += at(p.o, p.o_stride, row, d) != at(p.q, p.q_stride, row, d);
        }
        if (threadIdx.x == 0) words[BOX_WORDS + MATRIX_WORDS] = missing;

        // Of matrix m, lane i has the elements 64 m + 2 i and 64 m + 2 i + 1.
        uint32_t r[4];
        for (int m = 0; m < 4; ++m) r[m] = 0x10000 + (64 * m + 2 * lane) * 0x10001;
        if (threadIdx.x < 32) stmatrix_x4(&smem.matrices[(5 * lane + 3) % 32 * 8], r);
        __syncthreads();  // the matrices are complete, and `stored` may be written again
        for (int i = threadIdx.x; i < MATRIX_WORDS; i += 64)
            memcpy(words + BOX_WORDS + i, &smem.matrices[2 * i], sizeof(float));
    }
}
