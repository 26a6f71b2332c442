// The contents of a TensorMap; common/runtime/pack.cpp fills it in. The tensor's axes are d,
// row, head and batch; elements are contiguous along d.
#pragma once
#include <stdint.h>

#include <cstddef>

namespace simt {

constexpr int32_t VALID_TENSOR_MAP = 0x70616d74;

struct TensorMapFields {
    uint64_t address;
    int32_t sizes[4];    // in elements
    int64_t strides[3];  // in bytes; of row, head and batch
    int32_t box_columns, box_rows;
    int32_t swizzle;
    int32_t valid;  // VALID_TENSOR_MAP; 0 if the launch descriptor has no such box
    int32_t element_bytes;
};

// A box of a tensor and its image in shared memory.
struct TensorBox {
    TensorMapFields map;
    int first[4];          // index of the box's first element: d, row, head, batch
    std::byte* in_shared;  // address of that element
};

}  // namespace simt
