// What the lanes of a warp do together: __syncwarp, shuffles and votes. Stricter than the hardware,
// so that programs that happen to work are rejected, too: every lane that the mask names must exist,
// must not have exited, and must come to the same place with the same mask. Warpgroups meet likewise.
#pragma once
#include <bit>
#include <type_traits>

#include "collective.h"

namespace simt {

constexpr uint32_t ALL_LANES = 0xffffffff;

inline int lane_id() { return Worker::current()->running_thread() % WARP_SIZE; }

template <typename Function>
void for_each_lane(uint32_t mask, Function function) {
    for (; mask; mask &= mask - 1) function(std::countr_zero(mask));
}

// Begins a report about the running thread's operation.
inline Report warp_fault(const char* what, const Operation& operation) {
    Report report = Worker::current()->fault(what);
    report.add(": ");
    operation.describe(report);
    return report;
}

// The running thread's warp, once it is certain that it can execute the operation.
inline Group& warp_for(const Operation& operation) {
    Group& warp = Worker::current()->warp();
    if (!(operation.mask >> lane_id() & 1)) {
        warp_fault("lane outside its own mask", operation)
            .add(", which does not name lane %d", lane_id())
            .fail();
    }
    if (operation.mask & ~(ALL_LANES >> (WARP_SIZE - warp.num_threads))) {
        warp_fault("mask with lanes that do not exist", operation)
            .add("; the warp has %d lanes", warp.num_threads)
            .fail();
    }
    return warp;
}

// The running thread's warpgroup, once it is certain that it can execute the operation.
inline Group& warpgroup_for(const Operation& operation) {
    Group& warpgroup = Worker::current()->warpgroup();
    if (warpgroup.num_threads < WARPGROUP_SIZE) {
        warp_fault("warpgroup that is not whole", operation)
            .add(", which needs %d threads; those from %d on are %d", WARPGROUP_SIZE,
                 warpgroup.first_thread, warpgroup.num_threads)
            .fail();
    }
    return warpgroup;
}

// In a collective of a group: reports where its threads have not brought the same.
template <typename Payload>
void require_same(const Group& group, const Operation& operation, Payloads<Payload> threads) {
    for (int i = 1; i < group.num_threads; ++i) {
        if (threads[i] == threads[0]) continue;
        Report report = warp_fault("threads disagree", operation);
        for (int j : {0, i}) {
            report.add("\n  thread %d: ", group.first_thread + j);
            threads[j].describe(report);
        }
        report.fail();
    }
}

template <typename T>
concept Shuffled = std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8);

// Every lane gives x and gets the x of lane `source`, which the mask must name.
template <Shuffled T>
T shuffle(const Operation& operation, T x, int source) {
    struct Payload {
        T given, got;
        int source;
    } payload{x, x, source};
    collective(warp_for(operation), operation, payload, [&](Payloads<Payload> lanes) {
        for_each_lane(operation.mask, [&](int lane) {
            const int source = lanes[lane].source;
            if (!(operation.mask >> source & 1)) {
                warp_fault("shuffle from a lane outside the mask", operation)
                    .add(", where lane %d reads lane %d", lane, source)
                    .fail();
            }
            lanes[lane].got = lanes[source].given;
        });
    });
    return payload.got;
}

// The lanes whose predicate is true.
inline uint32_t ballot(const Operation& operation, bool predicate) {
    struct Payload {
        bool predicate;
        uint32_t ballot;
    } payload{predicate, 0};
    collective(warp_for(operation), operation, payload, [&](Payloads<Payload> lanes) {
        uint32_t ballot = 0;
        for_each_lane(operation.mask, [&](int lane) {
            if (lanes[lane].predicate) ballot |= 1u << lane;
        });
        for_each_lane(operation.mask, [&](int lane) { lanes[lane].ballot = ballot; });
    });
    return payload.ballot;
}

}  // namespace simt

inline void __syncwarp(uint32_t mask = simt::ALL_LANES, simt::Site site = simt::Site::here()) {
    const simt::Operation operation = {"__syncwarp", site, mask};
    simt::collective(simt::warp_for(operation), operation);
}

template <simt::Shuffled T>
T __shfl_sync(uint32_t mask, T x, int source, simt::Site site = simt::Site::here()) {
    return simt::shuffle({"__shfl_sync", site, mask}, x, source & (simt::WARP_SIZE - 1));
}

template <simt::Shuffled T>
T __shfl_xor_sync(uint32_t mask, T x, int lane_mask, simt::Site site = simt::Site::here()) {
    const int source = simt::lane_id() ^ lane_mask;
    return simt::shuffle({"__shfl_xor_sync", site, mask}, x, source & (simt::WARP_SIZE - 1));
}

// Where the source would lie outside of the warp, a lane keeps its own value.
template <simt::Shuffled T>
T __shfl_down_sync(uint32_t mask, T x, uint32_t delta, simt::Site site = simt::Site::here()) {
    const uint32_t lane = simt::lane_id();
    const uint32_t source = delta < simt::WARP_SIZE - lane ? lane + delta : lane;
    return simt::shuffle({"__shfl_down_sync", site, mask}, x, source);
}

template <simt::Shuffled T>
T __shfl_up_sync(uint32_t mask, T x, uint32_t delta, simt::Site site = simt::Site::here()) {
    const uint32_t lane = simt::lane_id();
    const uint32_t source = delta <= lane ? lane - delta : lane;
    return simt::shuffle({"__shfl_up_sync", site, mask}, x, source);
}

inline uint32_t __ballot_sync(uint32_t mask, int predicate, simt::Site site = simt::Site::here()) {
    return simt::ballot({"__ballot_sync", site, mask}, predicate);
}

inline int __any_sync(uint32_t mask, int predicate, simt::Site site = simt::Site::here()) {
    return simt::ballot({"__any_sync", site, mask}, predicate) != 0;
}

inline int __all_sync(uint32_t mask, int predicate, simt::Site site = simt::Site::here()) {
    return simt::ballot({"__all_sync", site, mask}, predicate) == mask;
}
