#include "reduce.cuh"

#include "access.h"
#include "grid.h"
#include "trap.h"

void red_add(float* to, float x, simt::Site site) {
    simt::require_aligned(to, sizeof(*to), "red_add", site);
    simt::Worker& worker = *simt::Worker::current();
    const auto* address = reinterpret_cast<const std::byte*>(to);
    if (worker.shared_memory().guards(address)) {
        simt::Report report =
            simt::operation_fault("reduction outside global memory", {"red_add", site});
        simt::describe_address(report, address);
        report.fail();
    }
    // Traps here, and not when the launch ends, where it must not be written.
    volatile float& now = *to;
    now = now;
    worker.grid().add(to, x);
}
