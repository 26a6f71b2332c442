// What the threads of a block share: __syncthreads and dynamic shared memory.
#pragma once
#include <cstddef>

#include "site.h"

void __syncthreads(simt::Site site = simt::Site::here());

namespace simt {

// The block's dynamic shared memory; reports where it is smaller or less aligned than that.
void* require_shared_memory(size_t bytes, size_t alignment, Site site);

}  // namespace simt

// The block's dynamic shared memory, laid out as the struct T. Poisoned at the start of each block.
// It is aligned to 16 bytes: a layout that relies on more must say alignas.
template <typename T>
T& shared_memory(simt::Site site = simt::Site::here()) {
    return *static_cast<T*>(simt::require_shared_memory(sizeof(T), alignof(T), site));
}
