// Copies between global and shared memory, for the host compiler: the twin of
// common/runtime/device/copy.cuh. An asynchronous copy lands as late as it may, in the wait that
// covers its group; until then its destination is poison.
#pragma once
#include "access.h"
#include "attention.cuh"

namespace simt {

void start_copy(void* to_shared, const void* from_global, bool valid, Site site);

// Lands all but the running thread's `pending` latest groups; copies not yet committed to a group
// are newer than all of them.
void land_copies(int pending);

}  // namespace simt

inline uint4 load_uint4(const Element* p, simt::Site site = simt::Site::here()) {
    return simt::vector_load<uint4>(p, "load_uint4", site);
}

inline void store_uint4(Element* p, uint4 x, simt::Site site = simt::Site::here()) {
    simt::vector_store(p, x, "store_uint4", site);
}

inline void cp_async_cg(Element* to_shared, const Element* from_global, bool valid,
                        simt::Site site = simt::Site::here()) {
    simt::start_copy(to_shared, from_global, valid, site);
}

void cp_async_commit_group();

template <int PENDING>
void cp_async_wait_group() {
    simt::land_copies(PENDING);
}
