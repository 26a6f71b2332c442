// A clock, for the host compiler: the twin of common/runtime/device/clock.cuh. It counts how often it has
// been read, by any thread: what was read later is larger, and by how much says nothing.
#pragma once
#include "attention.cuh"

namespace simt {

inline int64_t clock_reads = 0;  // by all workers

}  // namespace simt

inline int64_t mov_clock64() { return __atomic_add_fetch(&simt::clock_reads, 1, __ATOMIC_RELAXED); }
