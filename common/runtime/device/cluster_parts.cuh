// For a cluster whose blocks have each a part of a work tile's keys. cluster.cuh says what reaching into
// another block's shared memory takes.
// common/runtime/simt/cluster_parts.cuh is the twin for the host compiler.
#pragma once
#include "slices.cuh"

// One more size for grids: the queries of all heads that share a key head.
constexpr Size GROUP_ROWS = Size(SEQ_K + 3);

// Arrives at the cluster's barrier, but passes on nothing that this thread has written: it only says
// that it has come so far. After fence_mbarrier_init that makes mbarriers known.
__device__ inline void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
