// Reads of shared memory by the async proxy, TMA stores and wgmma, with a check that they see what
// was written.
#pragma once
#include "access.h"

namespace simt {

inline const bool uses_async_proxy = async_proxy_used = true;

// Copies bytes of shared memory as the async proxy sees them, which must be as they are.
inline void read_async(const std::byte* address, size_t bytes, void* to, const char* operation,
                       Site site) {
    require_shared(address, bytes, operation, site);
    const Worker& worker = *Worker::current();
    const AsyncView& view = worker.async_view();
    const size_t begin = address - worker.shared_memory().data;
    const size_t byte = view.first_unpublished(begin, begin + bytes);
    if (byte < begin + bytes) {
        Report report = worker.fault("missing fence_proxy_async");
        report.add(": %s (%s:%d) reads byte %zu of shared memory, written ", operation,
                   site.file_name(), site.line, byte);
        if (view.writer(byte) != AsyncView::NOBODY) report.add("by thread %d ", view.writer(byte));
        report.add("with no fence_proxy_async since");
        report.fail();
    }
    memcpy(to, view.data() + begin, bytes);
}

}  // namespace simt
