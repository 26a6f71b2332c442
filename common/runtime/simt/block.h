// What the threads of a block share: the barrier and the dynamic shared memory.
#pragma once
#include <cstddef>

#include "site.h"

void __syncthreads(simt::Site site = simt::Site::here());

namespace simt {

// The block's dynamic shared memory, which must have so many bytes and be so aligned.
void* require_shared_memory(size_t bytes, size_t alignment, Site site);

}  // namespace simt

// The block's dynamic shared memory, laid out as the struct T. Poisoned at the start of each block.
// It is aligned to 16 bytes: a layout that relies on more must say alignas.
template <typename T>
T& shared_memory(simt::Site site = simt::Site::here()) {
    return *static_cast<T*>(simt::require_shared_memory(sizeof(T), alignof(T), site));
}
