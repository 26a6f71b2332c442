// What the lanes of a warp do together: __syncwarp, shuffles and votes. Stricter than the hardware,
// to reject programs that merely happen to work: every lane in the mask must exist, must not have
// exited, and must reach the same source line with the same mask. What a lane has written is visible
// at once, also after a shuffle or a vote; as CUDA promises that only after a __syncwarp, races.h
// reports who relies on it.
#pragma once
#include <stdint.h>
#include <string.h>

#include <type_traits>

#include "site.h"

namespace simt {

constexpr int WARP_SIZE = 32;
constexpr uint32_t ALL_LANES = 0xffffffff;

int lane_id();  // of the running thread

// Each lane contributes `bits` and gets those of lane `source`, which the mask must contain.
uint64_t exchange(const char* name, uint32_t mask, uint64_t bits, int source, Site site);

template <typename T>
concept Shuffled = std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8);

template <Shuffled T>
T shuffle(const char* name, uint32_t mask, T x, int source, Site site) {
    uint64_t bits = 0;
    memcpy(&bits, &x, sizeof(x));
    bits = exchange(name, mask, bits, source, site);
    memcpy(&x, &bits, sizeof(x));
    return x;
}

}  // namespace simt

void __syncwarp(uint32_t mask = simt::ALL_LANES, simt::Site site = simt::Site::here());

template <simt::Shuffled T>
T __shfl_sync(uint32_t mask, T x, int source, simt::Site site = simt::Site::here()) {
    return simt::shuffle("__shfl_sync", mask, x, source & (simt::WARP_SIZE - 1), site);
}

template <simt::Shuffled T>
T __shfl_xor_sync(uint32_t mask, T x, int lane_mask, simt::Site site = simt::Site::here()) {
    const int source = simt::lane_id() ^ lane_mask;
    return simt::shuffle("__shfl_xor_sync", mask, x, source & (simt::WARP_SIZE - 1), site);
}

// Where the source lane would lie outside the warp, a lane keeps its own value.
template <simt::Shuffled T>
T __shfl_down_sync(uint32_t mask, T x, uint32_t delta, simt::Site site = simt::Site::here()) {
    const uint32_t lane = simt::lane_id();
    const uint32_t source = delta < simt::WARP_SIZE - lane ? lane + delta : lane;
    return simt::shuffle("__shfl_down_sync", mask, x, source, site);
}

template <simt::Shuffled T>
T __shfl_up_sync(uint32_t mask, T x, uint32_t delta, simt::Site site = simt::Site::here()) {
    const uint32_t lane = simt::lane_id();
    const uint32_t source = delta <= lane ? lane - delta : lane;
    return simt::shuffle("__shfl_up_sync", mask, x, source, site);
}

uint32_t __ballot_sync(uint32_t mask, int predicate, simt::Site site = simt::Site::here());
int __any_sync(uint32_t mask, int predicate, simt::Site site = simt::Site::here());
int __all_sync(uint32_t mask, int predicate, simt::Site site = simt::Site::here());
