// The contents of a TensorMap; common/runtime/pack.cpp fills it in. The tensor's axes are d,
// row, head and batch, and ragged.cuh's fifth one; elements are contiguous along d.
#pragma once
#include <stdint.h>

#include <cstddef>

namespace simt {

constexpr int32_t VALID_TENSOR_MAP = 0x70616d74;
constexpr int MAX_AXES = 5;

struct TensorMapFields {
    uint64_t address;
    int64_t begin;                  // bytes from the address to the first element
    int32_t axes;                   // 4 or 5
    int32_t sizes[MAX_AXES];        // in elements
    int64_t strides[MAX_AXES - 1];  // in bytes; of all axes but d
    int32_t box_columns, box_rows;
    int32_t swizzle;
    int32_t valid;  // VALID_TENSOR_MAP; 0 if the launch descriptor has no such box
    int32_t element_bytes;
};

// A box of a tensor and its image in shared memory.
struct TensorBox {
    TensorMapFields map;
    int first[MAX_AXES];   // index of the box's first element: d, row, head, batch, and the fifth
    std::byte* in_shared;  // address of that element
};

}  // namespace simt
