#include "collective.h"

#include <bit>

namespace simt {

Group& warp_for(const Operation& operation) {
    Group& warp = Worker::current()->warp();
    if (!(operation.mask >> lane_id() & 1)) {
        operation_fault("lane outside its own mask", operation)
            .add(", which does not name lane %d", lane_id())
            .fail();
    }
    if (operation.mask & ~(ALL_LANES >> (WARP_SIZE - warp.num_threads))) {
        operation_fault("mask with lanes that do not exist", operation)
            .add("; the warp has %d lanes", warp.num_threads)
            .fail();
    }
    return warp;
}

Group& warpgroup_for(const Operation& operation) {
    Group& warpgroup = Worker::current()->warpgroup();
    if (warpgroup.num_threads < WARPGROUP_SIZE) {
        operation_fault("warpgroup that is not whole", operation)
            .add(", which needs %d threads; those from %d on are %d", WARPGROUP_SIZE,
                 warpgroup.first_thread, warpgroup.num_threads)
            .fail();
    }
    return warpgroup;
}

bool arrive_last(Group& group, const Operation& operation) {
    for (Rendezvous& rendezvous : group.open) {
        if (rendezvous.operation != operation) continue;
        if (++rendezvous.arrived < rendezvous.expected) return false;
        rendezvous = group.open.back();
        group.open.pop_back();
        return true;
    }
    const int expected = operation.mask ? std::popcount(operation.mask) : group.num_threads;
    if (expected == 1) return true;
    group.open.push_back({operation, expected, 1});
    return false;
}

}  // namespace simt
