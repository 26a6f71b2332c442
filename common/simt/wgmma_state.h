// What wgmma in flight have to do yet. The scheduler keeps this for each warp, which lands its share
// of them in a wait of its own; common/simt/wgmma.cuh changes it.
#pragma once
#include <stdint.h>

#include <array>
#include <functional>
#include <memory>
#include <vector>

#include "thread.h"

namespace simt {

// A warp's 16 rows of D while wgmma are in flight that write them: the registers hold IN_FLIGHT.
struct Accumulator {
    float* registers[WARP_SIZE];  // [tiles][4] of each lane
    int tiles;
    std::vector<float> sum;  // [16, 8 tiles], as far as it has been computed
};

// A warp's share of a wgmma that it has not landed.
struct AsyncProduct {
    Site site;
    uint64_t group;  // how many groups its warp had committed at its issue
    std::shared_ptr<Accumulator> d;
    std::function<void(const AsyncProduct&)> multiply = {};  // d's sum += A B
    const uint32_t* a_registers[WARP_SIZE] = {};             // where A is in registers
    uint32_t a[WARP_SIZE][4] = {};                           // what they held at the issue
};

struct WgmmaState {
    std::vector<AsyncProduct> products = {};  // in the order of their issue
    uint64_t num_groups = 0;                  // committed so far
    bool fenced = false;                      // since the last group
};

}  // namespace simt
