// For a cluster whose blocks share a work tile and have each a slice of a head's columns: they send each
// other parts of S, P, dP and dS. cluster.cuh says what reaching into another block's shared memory takes.
// common/runtime/simt/slices.cuh is the twin for the host compiler.
#pragma once
#include "cluster.cuh"

// One more size for grids: the columns of a head, of v's where those are more. In slices of so many for
// the blocks of a cluster, it is the first axis of a grid whose blocks of a cluster share a work tile.
constexpr Size COLUMNS = Size(SEQ_K + 2);

// Starts a store of four floats to the shared memory of the block with this rank, where their 16 bytes
// count towards the mbarrier's phase. The address must be 16-byte aligned. The addresses there are
// computed each time: kept from one tile to the next they would take registers.
__device__ inline void st_async(float (&to_shared)[4], float4 x, Mbarrier& barrier, int rank) {
    const uint32_t to = __cvta_generic_to_shared(to_shared);
    const uint32_t full = __cvta_generic_to_shared(&barrier);
    asm volatile(
        "{\n"
        ".reg .b32 to, full;\n"
        "mapa.shared::cluster.u32 to, %0, %6;\n"
        "mapa.shared::cluster.u32 full, %5, %6;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%1, %2, %3, %4}, "
        "[full];\n"
        "}" ::"r"(to),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(full), "r"(rank)
        : "memory");
}
