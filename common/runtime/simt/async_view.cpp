#include "async_view.h"

#include "access.h"
#include "scheduler.h"

namespace simt {

void AsyncView::report_unpublished(size_t offset, const char* operation, Site site) const {
    while (view[offset] == smem.data[offset]) ++offset;
    Report report = operation_fault("missing fence_proxy_async", {operation, site});
    report.add(" reads byte %zu of shared memory, written ", offset);
    const int writer = writers[offset / WORD_BYTES];
    if (writer != NOBODY) report.add("by thread %d ", writer);
    report.add("with no fence_proxy_async since").fail();
}

void read_async(const std::byte* address, size_t bytes, void* to, const char* operation,
                Site site) {
    const size_t offset = require_shared(address, bytes, operation, site);
    Worker::current()->async_view().read(offset, bytes, to, operation, site);
}

}  // namespace simt
