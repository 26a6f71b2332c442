#include "collective.h"

#include <bit>

namespace simt {

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
