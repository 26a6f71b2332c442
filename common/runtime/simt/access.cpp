#include "access.h"

#include "scheduler.h"
#include "trap.h"

namespace simt {
namespace {

// Begins a report about an address that the running thread passed to an operation.
Report address_fault(const char* what, const char* operation, Site site) {
    Report report = operation_fault(what, {operation, site});
    report.add(" needs ");
    return report;
}

}  // namespace

void require_aligned(const void* address, size_t bytes, const char* operation, Site site) {
    if (reinterpret_cast<uintptr_t>(address) % bytes == 0) return;
    Report report = address_fault("misaligned access", operation, site);
    report.add("a multiple of %zu bytes, not the address ", bytes);
    describe_address(report, static_cast<const std::byte*>(address));
    report.fail();
}

void vector_access(const void* address, size_t bytes, const char* operation, Site site) {
    require_aligned(address, bytes, operation, site);
    Worker& worker = *Worker::current();
    BankCounter* banks = worker.banks();
    if (!banks) return;
    const auto* first = static_cast<const std::byte*>(address);
    const Buffer& smem = worker.shared_memory();
    if (smem.contains(first))
        banks->count(operation, site, worker.running_thread(), first - smem.data, bytes);
}

void shared_access(const void* address, size_t bytes, const char* operation, Site site) {
    vector_access(address, bytes, operation, site);
    require_shared(address, bytes, operation, site);
}

size_t require_shared(const void* address, size_t bytes, const char* operation, Site site) {
    const auto* first = static_cast<const std::byte*>(address);
    const Buffer& smem = Worker::current()->shared_memory();
    if (!smem.contains(first) || bytes > size_t(smem.data + smem.bytes - first)) {
        Report report = address_fault("access outside shared memory", operation, site);
        report.add("%zu bytes of the block's shared memory, not the address ", bytes);
        describe_address(report, first);
        report.fail();
    }
    return first - smem.data;
}

void note_write(const void* address, size_t bytes) {
    Worker& worker = *Worker::current();
    const auto* first = static_cast<const std::byte*>(address);
    const Buffer& smem = worker.shared_memory();
    if (smem.contains(first))
        worker.async_view().note_write(worker.running_thread(), first - smem.data, bytes);
}

}  // namespace simt
