// Slices of a head's columns, for the host compiler: the twin of common/runtime/device/slices.cuh. A
// store to another block's shared memory lands as late as a copy does; tma.cpp has it.
#pragma once
#include "cluster.cuh"

constexpr Size COLUMNS = Size(SEQ_K + 2);

void st_async(float (&to_shared)[4], float4 x, Mbarrier& barrier, int rank,
              simt::Site site = simt::Site::here());
