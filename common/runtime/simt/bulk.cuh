// Bulk copies and reductions, for the host compiler: the twin of common/runtime/device/bulk.cuh. A
// load lands as a tensor's does. A reduction reads shared memory as a tensor's store does, and is
// carried out as red_add is. tma.cpp has both.
#pragma once
#include "tma.cuh"

void cp_async_bulk_load(void* to_shared, const void* from_global, int bytes, Mbarrier& barrier,
                        simt::Site site = simt::Site::here());

void cp_reduce_async_bulk_add(float* to_global, const float* from_shared, int bytes,
                              simt::Site site = simt::Site::here());
