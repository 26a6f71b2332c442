// A clock, for the host compiler: the twin of common/runtime/device/clock.cuh. It counts its
// readings by all threads: later readings are larger; differences mean nothing.
#pragma once
#include "attention.cuh"

namespace simt {

inline int64_t clock_reads = 0;  // by all workers

}  // namespace simt

inline int64_t mov_clock64() { return __atomic_add_fetch(&simt::clock_reads, 1, __ATOMIC_RELAXED); }
