#include "warp.h"

#include <bit>

#include "collective.h"

namespace simt {
namespace {

template <typename Function>
void for_each_lane(uint32_t mask, Function function) {
    for (; mask; mask &= mask - 1) function(std::countr_zero(mask));
}

// The lanes whose predicate is true.
uint32_t ballot(const char* name, uint32_t mask, bool predicate, Site site) {
    const Operation operation = {name, site, mask};
    struct Payload {
        bool predicate;
        uint32_t ballot;
    } payload{predicate, 0};
    collective(warp_for(operation), operation, payload, [&](Payloads<Payload> lanes) {
        uint32_t ballot = 0;
        for_each_lane(mask, [&](int lane) {
            if (lanes[lane].predicate) ballot |= 1u << lane;
        });
        for_each_lane(mask, [&](int lane) { lanes[lane].ballot = ballot; });
    });
    return payload.ballot;
}

}  // namespace

int lane_id() { return Worker::current()->running_thread() % WARP_SIZE; }

uint64_t exchange(const char* name, uint32_t mask, uint64_t bits, int source, Site site) {
    const Operation operation = {name, site, mask};
    struct Payload {
        uint64_t given, got;
        int source;
    } payload{bits, bits, source};
    collective(warp_for(operation), operation, payload, [&](Payloads<Payload> lanes) {
        for_each_lane(mask, [&](int lane) {
            const int source = lanes[lane].source;
            if (!(mask >> source & 1)) {
                operation_fault("shuffle from a lane outside the mask", operation)
                    .add(", where lane %d reads lane %d", lane, source)
                    .fail();
            }
            lanes[lane].got = lanes[source].given;
        });
    });
    return payload.got;
}

}  // namespace simt

void __syncwarp(uint32_t mask, simt::Site site) {
    const simt::Operation operation = {"__syncwarp", site, mask};
    simt::Group& warp = simt::warp_for(operation);
    simt::collective(warp, operation, [&] {
        simt::Worker::current()->races().order_lanes(warp.first_thread, mask);
    });
}

uint32_t __ballot_sync(uint32_t mask, int predicate, simt::Site site) {
    return simt::ballot("__ballot_sync", mask, predicate, site);
}

int __any_sync(uint32_t mask, int predicate, simt::Site site) {
    return simt::ballot("__any_sync", mask, predicate, site) != 0;
}

int __all_sync(uint32_t mask, int predicate, simt::Site site) {
    return simt::ballot("__all_sync", mask, predicate, site) == mask;
}
