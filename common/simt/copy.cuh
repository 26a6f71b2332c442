// Copies between global and shared memory, for the host compiler: the twin of
// common/device/copy.cuh. An asynchronous copy lands as late as it may, in the wait that covers its
// group: a copy that is waited for by too few threads, too late, or never, leaves poison.
#pragma once
#include "attention.cuh"

inline uint4 load_uint4(const Element* p, simt::Site site = simt::Site::here()) {
    return *reinterpret_cast<const uint4*>(simt::vector_access<16>(p, "load_uint4", site));
}

inline void store_uint4(Element* p, uint4 x, simt::Site site = simt::Site::here()) {
    simt::vector_access<16>(p, "store_uint4", site);
    *reinterpret_cast<uint4*>(simt::note_write(p, 16)) = x;
}

// From here to the wait the destination may hold the old or the new elements, which is good for
// neither: it is poisoned. The source is read when the copy lands; that it can be is tried now.
inline void cp_async_cg(Element* to_shared, const Element* from_global, bool valid,
                        simt::Site site = simt::Site::here()) {
    simt::Thread& self = simt::Worker::current()->self();
    Element* to = simt::shared_access<16>(to_shared, "cp_async_cg", site);
    const Element* from = simt::require_aligned<16>(from_global, "cp_async_cg", site);
    memset(to, simt::POISON, 16);
    if (valid) *reinterpret_cast<const volatile char*>(from);
    self.copies.push_back({to, valid ? from : nullptr, self.num_copy_groups});
}

inline void cp_async_commit_group() { ++simt::Worker::current()->self().num_copy_groups; }

// Lands the groups it waits for. What is in no group yet is newer than all of them.
template <int PENDING>
void cp_async_wait_group() {
    simt::Thread& self = simt::Worker::current()->self();
    size_t landed = 0;
    for (; landed < self.copies.size(); ++landed) {
        const simt::AsyncCopy& copy = self.copies[landed];
        if (copy.group + PENDING >= self.num_copy_groups) break;
        if (copy.from) {
            memcpy(copy.to, copy.from, 16);
        } else {
            memset(copy.to, 0, 16);
        }
    }
    self.copies.erase(self.copies.begin(), self.copies.begin() + landed);
}
