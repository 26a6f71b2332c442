// ragged -- boxes of a tensor through TMA, whose rows end where the copy says
// change: none; this is the kernel of verify/tests/test_ragged.py
// why: to see that the CPU twins of the instructions compute what a GPU does
// limits: bf16, fp16; head_dim 64-128 by 8; sm_90
// taken: only for lengths and windows; its maps are those of such steps
#include "attention_lengths.cuh"
#include "mma.cuh"
#include "ragged.cuh"

constexpr int COLUMNS = 64, ROWS = 12;  // not a whole pattern of the swizzle

struct alignas(1024) SharedMemory {
    alignas(1024) Element loaded[ROWS * COLUMNS];
    alignas(1024) Element stored[ROWS * COLUMNS];
    Mbarrier full;
};

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_forward", .threads = 64, .smem_bytes = sizeof(SharedMemory)}},
    .q_box = {ROWS, COLUMNS, SWIZZLE_128B},
    .o_box = {ROWS, COLUMNS, SWIZZLE_128B},
};
}

// One block, as boxes may overlap. It copies a box from q, with 1 + i % 3 in the upper three bits
// of each element of box i, to the same place in o, which no box may begin before. Where the box is
// say the first integers of row i of k: d, x, head, batch, end. One that begins outside of the map is
// not loaded: zeros stand for it. What has been loaded goes to lse [seq_k, words] as it lies in
// shared memory.
extern "C" __global__ void attention_forward(const __grid_constant__ LengthsParams p) {
    constexpr int BOX_WORDS = ROWS * COLUMNS / 2;
    SharedMemory& smem = shared_memory<SharedMemory>();

    if (threadIdx.x == 0) {
        mbarrier_init(smem.full, 1);
        fence_mbarrier_init();
    }
    __syncthreads();  // the mbarrier is initialized
    int loads = 0;
    for (int box = 0; box < p.seq_k; ++box) {
        const auto* place = reinterpret_cast<const int16_t*>(p.k + box * p.k_stride.row);
        float* words = p.lse + int64_t(box) * BOX_WORDS;
        const int sizes[] = {HEAD_DIM, p.seq_q, p.heads, p.batch, p.seq_q + 1};
        bool is_inside = true;
        for (int axis = 0; axis < 5; ++axis)
            is_inside = is_inside && place[axis] >= 0 && place[axis] < sizes[axis];
        if (is_inside && threadIdx.x == 0) {
            mbarrier_arrive_expect_tx(smem.full, sizeof(smem.loaded));
            cp_async_bulk_tensor_5d_load(smem.loaded, p.q_map, place[0], place[1], place[2],
                                         place[3], place[4], smem.full);
        }
        while (is_inside && !mbarrier_try_wait_parity(smem.full, loads % 2)) {
        }
        loads += is_inside;
        for (int i = threadIdx.x; i < BOX_WORDS; i += 64) {
            uint32_t word = 0;
            if (is_inside) memcpy(&word, &smem.loaded[2 * i], sizeof(word));
            memcpy(words + i, &word, sizeof(word));
            word |= (1 + box % 3) * 0x20002000u;
            memcpy(&smem.stored[2 * i], &word, sizeof(word));
        }
        fence_proxy_async();
        __syncthreads();  // the box is there, and each thread has fenced
        const int least = min(min(min(place[0], place[1]), min(place[2], place[3])), place[4]);
        if (threadIdx.x == 0 && least >= 0) {
            cp_async_bulk_tensor_5d_store(p.o_map, place[0], place[1], place[2], place[3], place[4],
                                          smem.stored);
            cp_async_bulk_commit_group();
            cp_async_bulk_wait_group<0>();
        }
        __syncthreads();  // both boxes may be written again
    }
}
