// What the threads of a block share: the barrier and the dynamic shared memory.
#pragma once
#include "collective.h"

inline void __syncthreads(simt::Site site = simt::Site::here()) {
    simt::collective(simt::Worker::current()->block(), {"__syncthreads", site});
}

// The block's dynamic shared memory, laid out as the struct T. Poisoned at the start of each block.
// It is aligned to 16 bytes: a layout that relies on more must say alignas.
template <typename T>
T& shared_memory() {
    const simt::Worker& worker = *simt::Worker::current();
    const simt::Buffer& smem = worker.shared_memory();
    if (sizeof(T) > smem.bytes) {
        worker.fault("too little shared memory")
            .add(": the layout has %zu bytes, the launch descriptor asks for %zu", sizeof(T),
                 smem.bytes)
            .fail();
    }
    if (reinterpret_cast<uintptr_t>(smem.data) % alignof(T)) {
        worker.fault("misaligned shared memory")
            .add(
                ": the launch descriptor asks for %zu bytes, not a multiple of %zu, the layout's "
                "alignment",
                smem.bytes, alignof(T))
            .fail();
    }
    return *reinterpret_cast<T*>(smem.data);
}
