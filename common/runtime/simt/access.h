// Address checks and bank-conflict counting for every access made through a wrapper. A check that
// fails ends in a report that names the operation and its site.
#pragma once
#include <cstddef>

#include "site.h"

namespace simt {

enum Access : bool { READ, WRITE };

void require_aligned(const void* address, size_t bytes, const char* operation, Site site);

// The running thread loads or stores a float4, uint4 or uint64_t, anywhere in memory, in one access,
// which must be aligned to its size.
template <typename T>
T vector_load(const void* address, const char* operation, Site site);
template <typename T>
void vector_store(void* address, T x, const char* operation, Site site);

// The running thread is about to access `bytes` bytes, which must be aligned to `bytes` and lie in
// the block's shared memory. Returns their offset there. Races are looked for elsewhere.
size_t shared_access(const void* address, size_t bytes, const char* operation, Site site);

// Returns the offset of `address` in the block's shared memory, which must contain all `bytes`
// bytes.
size_t require_shared(const void* address, size_t bytes, const char* operation, Site site);

// `address` must be aligned to `bytes` and lie outside of the block's shared memory.
void require_global(const void* address, size_t bytes, const char* operation, Site site);

// The running thread is about to access bytes of any memory. For races.h and global_races.h, to which
// the compiler reports the accesses of a step, but not those of the runtime.
void track(Access access, const void* address, size_t bytes, Site site);

// The running thread adds to floats of global memory. A bad address traps here, and not when the
// launch ends; until then they keep their values.
void track_reduction(float* to, int floats, Site site);

// The running thread is about to write `bytes` bytes of any memory with an ordinary store.
void note_write(const void* address, size_t bytes);

}  // namespace simt

// For functions in headers that report their accesses to shared memory themselves, or have none: the
// compiler does not instrument them. It inlines in them only functions that are marked as well.
#define SIMT_UNTRACKED __attribute__((no_sanitize("thread")))
