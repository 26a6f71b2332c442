// The tensor memory accelerator (sm_90): one thread has a box of a tensor copied between global and
// shared memory. A tensor map says where the tensor lies and what a box is; the host makes it from
// the launch descriptor. common/runtime/simt/tma.cuh is the twin for the host compiler.
#pragma once
#include "mbarrier.cuh"

// Starts to fetch the map, which the first copy would wait for.
__device__ inline void prefetch_tensormap(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Starts a copy of the map's box, whose first element is the tensor's element (d, row, head, batch),
// to shared memory: the box's rows one after another, swizzled as the map says, zeros where the box
// lies outside of the tensor. Its bytes, zeros too, count towards the barrier's phase.
// to_shared must be 128-byte aligned, or to the swizzle's pattern (8 rows) where it is longer; d, in
// bytes, a multiple of 16.
__device__ inline void cp_async_bulk_tensor_load(Element* to_shared, const TensorMap& map, int d,
                                                 int row, int head, int batch, Mbarrier& barrier) {
    const uint32_t to = __cvta_generic_to_shared(to_shared);
    const uint32_t full = __cvta_generic_to_shared(&barrier);
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
        "l"(&map), "r"(d), "r"(row), "r"(head), "r"(batch), "r"(full)
        : "memory");
}

// Starts a copy of a box from shared memory to the tensor, without what lies past the tensor's end;
// no box may start before its beginning. The copy sees what ordinary stores have written to shared
// memory only after fence_proxy_async.
__device__ inline void cp_async_bulk_tensor_store(const TensorMap& map, int d, int row, int head,
                                                  int batch, const Element* from_shared) {
    const uint32_t from = __cvta_generic_to_shared(from_shared);
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
        "[%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
        "r"(d), "r"(row), "r"(head), "r"(batch), "r"(from)
        : "memory");
}

// Commits the stores, and the reductions of bulk.cuh, that this thread has started since its last
// group as its next group.
__device__ inline void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but this thread's PENDING latest groups have read their shared memory, which may
// then be written again, or cease to exist as the block ends.
template <int PENDING>
__device__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Waits until all but this thread's PENDING latest groups have written global memory, too: stores
// of different groups are not ordered otherwise.
template <int PENDING>
__device__ void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Makes this thread's ordinary stores to shared memory visible to the async proxy (TMA, wgmma) in
// all threads that a barrier then tells of them.
__device__ inline void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
