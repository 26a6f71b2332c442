// What every access through a wrapper passes: checks of its address, and the count of bank
// conflicts. A check that fails ends in a report that names the operation and its site.
#pragma once
#include <cstddef>

#include "site.h"

namespace simt {

void require_aligned(const void* address, size_t bytes, const char* operation, Site site);

// The running thread's access to `bytes` bytes of any memory, aligned to as many.
void vector_access(const void* address, size_t bytes, const char* operation, Site site);

// The running thread's access to `bytes` bytes of the block's shared memory, aligned to as many.
void shared_access(const void* address, size_t bytes, const char* operation, Site site);

// Where in the block's shared memory the `bytes` bytes from `address` on lie.
size_t require_shared(const void* address, size_t bytes, const char* operation, Site site);

// The running thread is about to write `bytes` bytes of any memory by an ordinary instruction.
void note_write(const void* address, size_t bytes);

}  // namespace simt
