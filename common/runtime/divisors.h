// What a step takes in place of launch.h's parameter where its blocks find their work tiles by
// divisions: the host has divided. Included by attention_divisors.cuh, in device/ and in simt/;
// mirrored by launch.py and pack.cpp.
#pragma once
#include "launch.h"

// A number that kernels divide by.
struct Divisor {
    uint32_t value, inverse;  // UINT32_MAX / value

    // By a multiplication, where a division takes 100 cycles.
    __device__ uint32_t divide(uint32_t n) const {
        const uint32_t quotient = uint64_t(n) * inverse >> 32;  // it, or one less
        return quotient + (n - quotient * value >= value);
    }
};

// Of a call, and of the step's first kernel.
struct Divisors {
    Divisor tiles[4];    // along each axis of the grid; 1 where it has no such axis
    Divisor works;       // the product of those but SEQ_K's: work tiles, if the axes count these
    Divisor blocks;      // gridDim.x
    Divisor group;       // heads of a key head
    int32_t split_keys;  // the size SPLIT_KEYS
};

struct DivisorsParams : AttentionParams, Divisors {};
static_assert(sizeof(DivisorsParams) == sizeof(AttentionParams) + alignof(AttentionParams));

// One more size for grids, of kernels after the first: 0 where the first is to leave work tiles whole, or
// else 1. It is where dealing them out to all blocks in turn keeps nine tenths of all rounds busy, where
// each has one tile of keys, or where 32 bits cannot count the tiles of all. A kernel without blocks is
// not launched.
constexpr Size SPLIT_KEYS = Size(SEQ_K + 4);
