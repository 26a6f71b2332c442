// Boxes of a tensor whose rows end where the copy says, for the host compiler: the twin of
// common/runtime/device/ragged.cuh. A load that begins outside of the map is reported.
#pragma once
#include "tma.cuh"

inline void cp_async_bulk_tensor_5d_load(Element* to_shared, const TensorMap& map, int d, int x,
                                         int head, int batch, int end, Mbarrier& barrier,
                                         simt::Site site = simt::Site::here()) {
    simt::start_load(to_shared, map, {5, {d, x, head, batch, end}}, barrier,
                     "cp_async_bulk_tensor_5d_load", site);
}

inline void cp_async_bulk_tensor_5d_store(const TensorMap& map, int d, int x, int head, int batch,
                                          int end, const Element* from_shared,
                                          simt::Site site = simt::Site::here()) {
    simt::start_store(map, {5, {d, x, head, batch, end}}, from_shared,
                      "cp_async_bulk_tensor_5d_store", site);
}
