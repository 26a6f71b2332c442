// Address checks and bank-conflict counting for every access made through a wrapper. A check that
// fails ends in a report that names the operation and its site.
#pragma once
#include <cstddef>

#include "site.h"

namespace simt {

void require_aligned(const void* address, size_t bytes, const char* operation, Site site);

// The running thread accesses `bytes` bytes of any memory, which must be aligned to `bytes`.
void vector_access(const void* address, size_t bytes, const char* operation, Site site);

// The same, and the bytes must lie in the block's shared memory.
void shared_access(const void* address, size_t bytes, const char* operation, Site site);

// Returns the offset of `address` in the block's shared memory, which must contain all `bytes`
// bytes.
size_t require_shared(const void* address, size_t bytes, const char* operation, Site site);

// The running thread is about to write `bytes` bytes of any memory with an ordinary store.
void note_write(const void* address, size_t bytes);

}  // namespace simt
