// The tensor memory accelerator, for the host compiler: the twin of common/runtime/device/tma.cuh.
// A load lands at any time after its issue, in half of the blocks as late as possible; until then
// its destination is poison. A store reads shared memory in the wait that covers its group and then
// writes the tensor at once or, in half of the blocks, as late as possible, after later stores.
#pragma once
#include "mbarrier.cuh"

namespace simt {

// The index of a box's first element: d, row, head and batch, or ragged.cuh's five.
struct BoxStart {
    int axes;
    int index[5];
};

void start_load(void* to_shared, const TensorMap& map, const BoxStart& first, Mbarrier& barrier,
                const char* name, Site site);
void start_store(const TensorMap& map, const BoxStart& first, const void* from_shared,
                 const char* name, Site site);

// All of the running thread's stores, reductions among them, but those of its `pending` latest
// groups; stores not yet committed to a group are newer than all of them.
void read_stores(int pending);
void land_stores(int pending);

}  // namespace simt

inline void prefetch_tensormap(const TensorMap&) {}  // it changes nothing but the time

inline void cp_async_bulk_tensor_load(Element* to_shared, const TensorMap& map, int d, int row,
                                      int head, int batch, Mbarrier& barrier,
                                      simt::Site site = simt::Site::here()) {
    simt::start_load(to_shared, map, {4, {d, row, head, batch}}, barrier,
                     "cp_async_bulk_tensor_load", site);
}

inline void cp_async_bulk_tensor_store(const TensorMap& map, int d, int row, int head, int batch,
                                       const Element* from_shared,
                                       simt::Site site = simt::Site::here()) {
    simt::start_store(map, {4, {d, row, head, batch}}, from_shared, "cp_async_bulk_tensor_store",
                      site);
}

void cp_async_bulk_commit_group();

template <int PENDING>
void cp_async_bulk_wait_group_read() {
    simt::read_stores(PENDING);
}

template <int PENDING>
void cp_async_bulk_wait_group() {
    simt::land_stores(PENDING);
}

void fence_proxy_async(simt::Site site = simt::Site::here());
