// The wgmma in flight. The scheduler keeps this for each warp, which lands its share of them in its
// own wait; wgmma.cpp changes it.
#pragma once
#include <stdint.h>

#include <vector>

#include "thread.h"

enum Major : int;  // defined in wgmma.cuh

namespace simt {

// A matrix in shared memory: its 64-bit descriptor and its major axis.
struct WgmmaOperand {
    uint64_t bits;
    Major major;
    const char* name;

    // The descriptor's fields, in bytes.
    int start() const { return (bits & 0x3fff) << 4; }
    int leading() const { return (bits >> 16 & 0x3fff) << 4; }
    int stride() const { return (bits >> 32 & 0x3fff) << 4; }
    int swizzle() const { return (4 - (bits >> 62)) % 4; }
    int row() const { return 16 << swizzle(); }
};

// A warp's 16 rows of D while wgmma in flight write them: the registers hold IN_FLIGHT.
struct Accumulator {
    float* registers[WARP_SIZE];  // [tiles][4] of each lane
    int tiles;
    int products;            // in flight
    std::vector<float> sum;  // [16, 8 tiles], of the products landed so far
};

// A warp's 16 rows of A, transposed, and all of B: [WGMMA_K, 16] and [WGMMA_K, N], as bits.
struct WgmmaElements {
    std::vector<uint16_t> a, b;
};

// A warp's share of a wgmma in flight.
struct AsyncProduct {
    Site site;
    uint64_t group;  // committed by its warp before its issue
    WgmmaOperand a, b;
    bool accumulate;
    float* d;  // lane 0's registers of its accumulator
    int tiles;
    const uint32_t* a_registers[WARP_SIZE] = {};  // of each lane, if A is in registers
    uint32_t a_held[WARP_SIZE][4] = {};           // their values at the issue
    WgmmaElements issued = {};                    // the elements at the issue
    void (*multiply_add)(std::vector<float>& sum, const WgmmaElements&, int columns);
};

struct WgmmaState {
    std::vector<AsyncProduct> products = {};     // in order of issue
    std::vector<Accumulator> accumulators = {};  // written by them
    uint64_t num_groups = 0;                     // committed so far
    bool fenced = false;                         // since the last group

    void begin_block() {
        products.clear();
        accumulators.clear();
        num_groups = 0;
        fenced = false;
    }

    // nullptr if no product in flight writes these registers.
    Accumulator* accumulator(const float* d, int tiles) {
        for (Accumulator& known : accumulators) {
            if (known.registers[0] == d && known.tiles == tiles) return &known;
        }
        return nullptr;
    }
};

}  // namespace simt
