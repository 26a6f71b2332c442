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

namespace {

void count_banks(size_t offset, size_t bytes, const char* operation, Site site) {
    Worker& worker = *Worker::current();
    if (BankCounter* banks = worker.banks())
        banks->count(operation, site, worker.running_thread(), offset, bytes);
}

// track(), and whether the bytes are in shared memory.
inline bool track_access(Access access, const void* address, size_t bytes, Site site) {
    Worker& worker = *Worker::current();
    const auto* first = static_cast<const std::byte*>(address);
    const Buffer& smem = worker.shared_memory();
    const bool is_shared = smem.contains(first);
    if (is_shared) {
        worker.races().access(access, first - smem.data, bytes, site);
    } else if (global_races.watches(address)) {
        global_races.access(access, address, bytes, site);
    }
    return is_shared;
}

void vector_access(Access access, const void* address, size_t bytes, const char* operation,
                   Site site) {
    require_aligned(address, bytes, operation, site);
    if (!track_access(access, address, bytes, site)) return;
    const Buffer& smem = Worker::current()->shared_memory();
    count_banks(static_cast<const std::byte*>(address) - smem.data, bytes, operation, site);
}

}  // namespace

template <typename T>
T vector_load(const void* address, const char* operation, Site site) {
    vector_access(READ, address, sizeof(T), operation, site);
    return *static_cast<const T*>(address);
}

template <typename T>
void vector_store(void* address, T x, const char* operation, Site site) {
    vector_access(WRITE, address, sizeof(T), operation, site);
    note_write(address, sizeof(T));
    *static_cast<T*>(address) = x;
}

template float4 vector_load(const void*, const char*, Site);
template uint4 vector_load(const void*, const char*, Site);
template void vector_store(void*, float4, const char*, Site);
template void vector_store(void*, uint4, const char*, Site);
template void vector_store(void*, uint64_t, const char*, Site);

size_t shared_access(const void* address, size_t bytes, const char* operation, Site site) {
    require_aligned(address, bytes, operation, site);
    const size_t offset = require_shared(address, bytes, operation, site);
    count_banks(offset, bytes, operation, site);
    return offset;
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

void require_global(const void* address, size_t bytes, const char* operation, Site site) {
    require_aligned(address, bytes, operation, site);
    const auto* first = static_cast<const std::byte*>(address);
    if (!Worker::current()->shared_memory().guards(first)) return;
    Report report = address_fault("access outside global memory", operation, site);
    report.add("global memory, not the address ");
    describe_address(report, first);
    report.fail();
}

void track(Access access, const void* address, size_t bytes, Site site) {
    track_access(access, address, bytes, site);
}

void track_reduction(float* to, int floats, Site site) {
    for (int i = 0; i < floats; ++i) {
        volatile float& now = to[i];
        now = now;
    }
    global_races.reduce(to, floats * sizeof(*to), site);
}

void note_write(const void* address, size_t bytes) {
    Worker& worker = *Worker::current();
    const auto* first = static_cast<const std::byte*>(address);
    const Buffer& smem = worker.shared_memory();
    if (smem.contains(first))
        worker.async_view().note_write(worker.running_thread(), first - smem.data, bytes);
}

}  // namespace simt
