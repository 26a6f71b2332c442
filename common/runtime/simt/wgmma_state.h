// What wgmma in flight have to do yet. The scheduler keeps this for each warp, which lands its share
// of them in a wait of its own; common/runtime/simt/wgmma.cpp changes it.
#pragma once
#include <stdint.h>

#include <vector>

#include "thread.h"

enum Major : int;  // wgmma.cuh has it

namespace simt {

// Of a matrix in shared memory the 64 bits, and which way it lies.
struct WgmmaOperand {
    uint64_t bits;
    Major major;
    const char* name;

    // The bits' fields, in bytes.
    int start() const { return (bits & 0x3fff) << 4; }
    int leading() const { return (bits >> 16 & 0x3fff) << 4; }
    int stride() const { return (bits >> 32 & 0x3fff) << 4; }
    int swizzle() const { return (4 - (bits >> 62)) % 4; }
    int row() const { return 16 << swizzle(); }
};

// A warp's 16 rows of D while wgmma are in flight that write them: the registers hold IN_FLIGHT.
struct Accumulator {
    float* registers[WARP_SIZE];  // [tiles][4] of each lane
    int tiles;
    int products;            // in flight
    std::vector<float> sum;  // [16, 8 tiles], as far as it has been computed
};

// A warp's 16 rows of A and all of B: [16 of k, 16] and [16 of k, N].
struct WgmmaElements {
    std::vector<float> a, b;
};

// A warp's share of a wgmma that it has not landed.
struct AsyncProduct {
    Site site;
    uint64_t group;  // how many groups its warp had committed at its issue
    WgmmaOperand a, b;
    bool accumulate;
    float* d;  // of its accumulator lane 0's registers
    int tiles;
    const uint32_t* a_registers[WARP_SIZE] = {};  // where A is in registers
    uint32_t a_held[WARP_SIZE][4] = {};           // what they held at the issue
    WgmmaElements (*read)(const AsyncProduct&);   // as they are now
    WgmmaElements issued = {};                    // as they were at the issue
};

struct WgmmaState {
    std::vector<AsyncProduct> products = {};     // in the order of their issue
    std::vector<Accumulator> accumulators = {};  // that they write
    uint64_t num_groups = 0;                     // committed so far
    bool fenced = false;                         // since the last group

    void begin_block() {
        products.clear();
        accumulators.clear();
        num_groups = 0;
        fenced = false;
    }

    // nullptr where no product in flight writes these registers.
    Accumulator* accumulator(const float* d, int tiles) {
        for (Accumulator& known : accumulators) {
            if (known.registers[0] == d && known.tiles == tiles) return &known;
        }
        return nullptr;
    }
};

}  // namespace simt
