#include "async_view.h"

#include "access.h"
#include "scheduler.h"

namespace simt {

void read_async(const std::byte* address, size_t bytes, void* to, const char* operation,
                Site site) {
    const size_t begin = require_shared(address, bytes, operation, site);
    const AsyncView& view = Worker::current()->async_view();
    const size_t byte = view.first_unpublished(begin, begin + bytes);
    if (byte < begin + bytes) {
        Report report = operation_fault("missing fence_proxy_async", {operation, site});
        report.add(" reads byte %zu of shared memory, written ", byte);
        if (view.writer(byte) != AsyncView::NOBODY) report.add("by thread %d ", view.writer(byte));
        report.add("with no fence_proxy_async since");
        report.fail();
    }
    memcpy(to, view.data() + begin, bytes);
}

}  // namespace simt
