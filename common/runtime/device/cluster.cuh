// Clusters (sm_90): the blocks of a cluster run at the same time, and reach into each other's
// shared memory. __cluster_dims__(N) in a kernel's signature, on the line of its __launch_bounds__,
// makes clusters of N consecutive blocks, and the grid is filled up to whole clusters. A block's rank
// is its number in its cluster.
//
// A variable has the same place in every block's shared memory: functions that reach into another
// block's take this block's variable and the rank of the block that is meant. That must have
// started and not ended, and its mbarriers must be initialized: mbarrier_init, fence_mbarrier_init
// and the cluster barrier at the beginning see to it, and at the end the cluster barrier again, or an
// mbarrier at which all those arrive that reach into the block.
//
// What ordinary stores have written to global memory is passed on by the cluster barrier, and by
// mbarrier_arrive_cluster to mbarrier_try_wait_parity_cluster. For that the arrival waits until all
// the thread's stores have reached the L2 (MEMBAR.ALL.GPU), and the wait empties the L1
// (CCTL.IVALL). Where shared memory is all that is exchanged, there is no need of either: a copy's
// bytes come with the phase that they complete, in any wait for it, and
// mbarrier_arrive_cluster_relaxed says that a buffer has been read.
// common/runtime/simt/cluster.cuh is the twin for the host compiler.
#pragma once
#include "tma.cuh"

// The block's number in its cluster.
__device__ inline int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The barrier of all threads of all blocks of the cluster, but those that have exited: each
// arrives, then waits. What they have written before they arrive is visible to all after the wait.
__device__ inline void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ inline void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// The address, in the cluster, of a variable of the block with this rank.
__device__ inline uint32_t mapa(const void* shared, int rank) {
    const uint32_t own = __cvta_generic_to_shared(shared);
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(own), "r"(rank));
    return address;
}

// Arrives at another block's mbarrier. What this thread has written before is visible to whoever
// waits by mbarrier_try_wait_parity_cluster.
__device__ inline void mbarrier_arrive_cluster(Mbarrier& barrier, int rank) {
    asm volatile(
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(mapa(&barrier, rank))
        : "memory");
}

// Likewise, but passes on nothing that has been stored in global memory: the other block learns
// that this thread has come so far, e.g. that it has read a buffer, to which copies may go again. It
// does not wait for loads: what has been read must have been used, or the copies may be faster.
__device__ inline void mbarrier_arrive_cluster_relaxed(Mbarrier& barrier, int rank) {
    asm volatile(
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(mapa(&barrier, rank))
        : "memory");
}

// mbarrier_try_wait_parity, for what other blocks have written before mbarrier_arrive_cluster: its
// own .acquire is one of the .cta.
__device__ inline bool mbarrier_try_wait_parity_cluster(Mbarrier& barrier, int parity) {
    const uint32_t address = __cvta_generic_to_shared(&barrier);
    uint32_t completed;
    asm volatile(
        "{\n"
        ".reg .pred completed;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 completed, [%1], %2;\n"
        "selp.u32 %0, 1, 0, completed;\n"
        "}"
        : "=r"(completed)
        : "r"(address), "r"(parity)
        : "memory");
    return completed;
}

// cp_async_bulk_tensor_load into all blocks whose rank is a bit of `ranks`: the box goes to the
// same place in each, and its bytes count there towards the phase of the mbarrier.
__device__ inline void cp_async_bulk_tensor_load_multicast(Element* to_shared, const TensorMap& map,
                                                           int d, int row, int head, int batch,
                                                           Mbarrier& barrier, uint16_t ranks) {
    const uint32_t to = __cvta_generic_to_shared(to_shared);
    const uint32_t full = __cvta_generic_to_shared(&barrier);
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
        "l"(&map), "r"(d), "r"(row), "r"(head), "r"(batch), "r"(full), "h"(ranks)
        : "memory");
}

// Starts a copy of bytes of this block's shared memory to that of the block with this rank, where
// they count towards the mbarrier's phase. Both addresses must be 16-byte aligned, and `bytes` a
// multiple of 16. The copy sees what ordinary stores have written only after fence_proxy_async.
// Only the other block learns that it has landed: until that tells, from_shared must stay as it is.
__device__ inline void cp_async_bulk_cluster(void* to_shared, const void* from_shared, int bytes,
                                             Mbarrier& barrier, int rank) {
    const uint32_t from = __cvta_generic_to_shared(from_shared);
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        "[%0], [%1], %2, [%3];" ::"r"(mapa(to_shared, rank)),
        "r"(from), "r"(bytes), "r"(mapa(&barrier, rank))
        : "memory");
}
