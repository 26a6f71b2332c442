#include "block.h"

#include "collective.h"

namespace simt {

void* require_shared_memory(size_t bytes, size_t alignment, Site site) {
    const Operation operation = {"shared_memory", site};
    const Worker& worker = *Worker::current();
    const Buffer& smem = worker.shared_memory();
    if (bytes > smem.bytes) {
        operation_fault("too little shared memory", operation)
            .add(": the layout has %zu bytes, the launch descriptor asks for %zu", bytes,
                 smem.bytes)
            .fail();
    }
    if (reinterpret_cast<uintptr_t>(smem.data) % alignment) {
        operation_fault("misaligned shared memory", operation)
            .add(
                ": the launch descriptor asks for %zu bytes, not a multiple of %zu, the layout's "
                "alignment",
                smem.bytes, alignment)
            .fail();
    }
    return smem.data;
}

}  // namespace simt

void __syncthreads(simt::Site site) {
    simt::Worker& worker = *simt::Worker::current();
    simt::collective(worker.block(), {"__syncthreads", site},
                     [&] { worker.races().order_block(); });
}
