#include "copy.cuh"

#include "global_races.h"
#include "scheduler.h"

namespace simt {

// Between issue and wait the destination holds either the old or the new elements, so it is
// poisoned. The source is read when the copy lands; reading a byte now makes a bad address trap
// here.
void start_copy(void* to_shared, const void* from_global, bool valid, Site site) {
    Worker& worker = *Worker::current();
    Thread& self = worker.self();
    const size_t offset = shared_access(to_shared, 16, "cp_async_cg", site);
    require_aligned(from_global, 16, "cp_async_cg", site);
    worker.races().access(WRITE, offset, 16, site);
    memset(to_shared, POISON, 16);
    if (valid) {
        *static_cast<const volatile char*>(from_global);
        global_races.require_kernel_wait(READ, from_global, site);
    }
    const bool first_of_group =
        self.copies.empty() || self.copies.back().group != self.num_copy_groups;
    self.copies.push_back({site, to_shared, valid ? from_global : nullptr, self.num_copy_groups});
    if (first_of_group) worker.may_fall_behind(mix(site.line, self.num_copy_groups));
}

void land_copies(int pending) {
    Thread& self = Worker::current()->self();
    size_t landed = 0;
    for (; landed < self.copies.size(); ++landed) {
        const AsyncCopy& copy = self.copies[landed];
        if (copy.group + pending >= self.num_copy_groups) break;
        track(WRITE, copy.to, 16, copy.site);
        if (copy.from) {
            track(READ, copy.from, 16, copy.site);
            memcpy(copy.to, copy.from, 16);
        } else {
            memset(copy.to, 0, 16);
        }
    }
    self.copies.erase(self.copies.begin(), self.copies.begin() + landed);
}

}  // namespace simt

void cp_async_commit_group() { ++simt::Worker::current()->self().num_copy_groups; }
