#include "ordered.cuh"

#include "access.h"
#include "collective.h"
#include "grid.h"
#include "trap.h"

namespace simt {
namespace {

struct Section {  // what a lane brings
    const int* counter;
    int place;

    bool operator==(const Section&) const = default;
    void describe(Report& report) const {
        report.add("place %d of the counter ", place);
        describe_address(report, reinterpret_cast<const std::byte*>(counter));
    }
};

// Reports a bulk store or reduction of the warp that it has not waited for: it may come earlier, or
// later, than those of the section.
void require_stores_landed(const Group& warp, const char* what, const Operation& operation) {
    Worker& worker = *Worker::current();
    for (int i = 0; i < warp.num_threads; ++i) {
        const std::vector<BulkCopy>& stores = worker.thread(warp.first_thread + i).stores;
        if (stores.empty()) continue;
        Report report = operation_fault(what, operation);
        report.add(": of thread %d, ", warp.first_thread + i);
        Operation{stores[0].name, stores[0].site}.describe(report);
        report
            .add(
                " may not come in the order of the places: call cp_async_bulk_commit_group, then "
                "cp_async_bulk_wait_group")
            .fail();
    }
}

}  // namespace
}  // namespace simt

void begin_ordered(int& counter, int place, simt::Site site) {
    simt::collective_between_blocks(
        "begin_ordered", counter, simt::Section{&counter, place}, site,
        [&](simt::Group& warp, const simt::Operation& operation) {
            simt::Worker& worker = *simt::Worker::current();
            if (warp.section) {
                simt::Report report = simt::operation_fault("section within a section", operation);
                report.add(": the warp is in the section of the counter ");
                describe_address(report, reinterpret_cast<const std::byte*>(warp.section));
                report.fail();
            }
            simt::require_stores_landed(warp, "section begun with a store in flight", operation);
            while (!worker.grid().begin_section(counter, place, operation))
                worker.wait_for_place(counter, place);
            simt::track(simt::READ, &counter, sizeof(counter), site);
            warp.section = &counter;
        });
}

void end_ordered(int& counter, int place, simt::Site site) {
    simt::collective_between_blocks(
        "end_ordered", counter, simt::Section{&counter, place}, site,
        [&](simt::Group& warp, const simt::Operation& operation) {
            simt::Worker& worker = *simt::Worker::current();
            if (warp.section != &counter) {
                simt::Report report = simt::operation_fault("section not begun", operation);
                report.add(": the warp is not in the section of the counter ");
                describe_address(report, reinterpret_cast<const std::byte*>(&counter));
                report.fail();
            }
            simt::require_stores_landed(warp, "section ended with a store in flight", operation);
            simt::track(simt::WRITE, &counter, sizeof(counter), site);
            worker.grid().end_section(counter, place, operation);
            warp.section = nullptr;
            if (worker.in_this_run(simt::mix(site.line))) worker.grid().fall_behind();
        });
}
