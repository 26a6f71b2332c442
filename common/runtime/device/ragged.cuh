// Boxes of a tensor whose rows end where the copy says (sm_90), not at the tensor's end: a sequence
// among others. The map has a fifth axis. Let the tensor have `rows` rows. Both the axis of the
// box's rows (x) and the fifth one (end) step from row to row, and the map begins `rows` rows
// before the tensor: element (d, x, head, batch, end) is the tensor's in row x + end - rows. A box
// that begins in row r of a sequence that ends before row `end` has x = r + rows - end, and what
// reaches x = rows is outside: loads give zeros, stores leave it out.
//
// The first row of a load must not be outside: such a load gives zeros, too, but it reads the map's
// first address as well, at which an H100 stops with an illegal address where no memory is mapped.
// Stores do not mind. The host makes such maps for the steps that take lengths.
// common/runtime/simt/ragged.cuh is the twin for the host compiler.
#pragma once
#include "tma.cuh"

// As cp_async_bulk_tensor_load of tma.cuh.
__device__ inline void cp_async_bulk_tensor_5d_load(Element* to_shared, const TensorMap& map, int d,
                                                    int x, int head, int batch, int end,
                                                    Mbarrier& barrier) {
    const uint32_t to = __cvta_generic_to_shared(to_shared);
    const uint32_t full = __cvta_generic_to_shared(&barrier);
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
        "l"(&map), "r"(d), "r"(x), "r"(head), "r"(batch), "r"(end), "r"(full)
        : "memory");
}

// As cp_async_bulk_tensor_store of tma.cuh.
__device__ inline void cp_async_bulk_tensor_5d_store(const TensorMap& map, int d, int x, int head,
                                                     int batch, int end,
                                                     const Element* from_shared) {
    const uint32_t from = __cvta_generic_to_shared(from_shared);
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group "
        "[%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(&map),
        "r"(d), "r"(x), "r"(head), "r"(batch), "r"(end), "r"(from)
        : "memory");
}
