// Parts of a work tile's keys, for the host compiler: the twin of
// common/runtime/device/cluster_parts.cuh.
#pragma once
#include "slices.cuh"

constexpr Size GROUP_ROWS = Size(SEQ_K + 3);

inline void cluster_arrive_relaxed(simt::Site site = simt::Site::here()) { cluster_arrive(site); }
