// What every access through a wrapper passes: checks of its address, and the count of bank
// conflicts.
#pragma once
#include "scheduler.h"
#include "trap.h"

namespace simt {

// Begins a report about an address that the running thread gave to an operation.
inline Report address_fault(const char* what, const char* operation, Site site) {
    Report report = Worker::current()->fault(what);
    report.add(": %s (%s:%d) needs ", operation, site.file_name(), site.line);
    return report;
}

template <size_t BYTES, typename T>
T* require_aligned(T* address, const char* operation, Site site) {
    if (reinterpret_cast<uintptr_t>(address) % BYTES) {
        Report report = address_fault("misaligned access", operation, site);
        report.add("a multiple of %zu bytes, not the address ", BYTES);
        describe_address(report, reinterpret_cast<const std::byte*>(address));
        report.fail();
    }
    return address;
}

inline void count_access(const void* address, int bytes, const char* operation, Site site) {
    Worker& worker = *Worker::current();
    BankCounter* banks = worker.banks();
    if (!banks) return;
    const auto* first = static_cast<const std::byte*>(address);
    const Buffer& smem = worker.shared_memory();
    if (smem.contains(first))
        banks->count(operation, site, worker.running_thread(), first - smem.data, bytes);
}

// The running thread's access to BYTES bytes of any memory, aligned to as many.
template <size_t BYTES, typename T>
T* vector_access(T* address, const char* operation, Site site) {
    require_aligned<BYTES>(address, operation, site);
    count_access(address, BYTES, operation, site);
    return address;
}

// Where in the block's shared memory the `bytes` bytes from `address` on lie.
inline size_t require_shared(const void* address, size_t bytes, const char* operation, Site site) {
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

// The running thread's access to BYTES bytes of the block's shared memory.
template <size_t BYTES, typename T>
T* shared_access(T* address, const char* operation, Site site) {
    vector_access<BYTES>(address, operation, site);
    require_shared(address, BYTES, operation, site);
    return address;
}

// The running thread is about to write `bytes` bytes of any memory by an ordinary instruction.
template <typename T>
T* note_write(T* address, size_t bytes) {
    Worker& worker = *Worker::current();
    const auto* first = reinterpret_cast<const std::byte*>(address);
    const Buffer& smem = worker.shared_memory();
    if (smem.contains(first))
        worker.async_view().note_write(worker.running_thread(), first - smem.data, bytes);
    return address;
}

}  // namespace simt
