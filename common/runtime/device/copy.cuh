// Copies of 16 bytes between global and shared memory: through registers, or asynchronous ones that
// leave the registers out (sm_80). common/runtime/simt/copy.cuh is the twin for the host compiler.
#pragma once
#include "attention.cuh"

// VEC elements, unconverted, in one 16-byte access; p must be 16-byte aligned.
__device__ inline uint4 load_uint4(const Element* p) { return *reinterpret_cast<const uint4*>(p); }
__device__ inline void store_uint4(Element* p, uint4 x) { *reinterpret_cast<uint4*>(p) = x; }

// Starts a copy of VEC elements to shared memory; where valid is false it reads nothing and writes
// zeros. Both addresses must be 16-byte aligned.
__device__ inline void cp_async_cg(Element* to_shared, const Element* from_global, bool valid) {
    const uint32_t to = __cvta_generic_to_shared(to_shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from_global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

// Commits the copies that this thread has started since its last group as its next group.
__device__ inline void cp_async_commit_group() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all but this thread's PENDING latest groups have landed. Other threads may read what
// it copied after a barrier that follows.
template <int PENDING>
__device__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
