// The seeded random numbers that order threads and blocks.
#pragma once
#include <stdint.h>

namespace simt {

// splitmix64's finalizer: a change of any input bit changes about half of the output's.
inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

// Combines both into one hash.
inline uint64_t mix(uint64_t x, uint64_t y) { return mix(mix(x) + y); }

class Random {
  public:
    explicit Random(uint64_t seed) : state(seed) {}

    // Uniform in [0, n).
    uint32_t below(uint32_t n) {
        state += 0x9e3779b97f4a7c15;
        return static_cast<uint32_t>(((mix(state) >> 32) * n) >> 32);
    }

  private:
    uint64_t state;
};

}  // namespace simt
