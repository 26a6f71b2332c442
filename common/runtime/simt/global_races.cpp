#include "global_races.h"

#include <algorithm>
#include <utility>

#include "scheduler.h"
#include "trap.h"

namespace simt {
namespace {

constexpr auto RELAXED = std::memory_order_relaxed;

}  // namespace

void GlobalRaces::watch(const Buffer& buffer) {
    std::vector<size_t> first_cells;
    size_t cells = 0;
    for (const Segment& segment : buffer.segments) {
        first_cells.push_back(cells);
        cells += segment.bytes / GRANULE_BYTES + 1;
    }
    all.push_back({buffer, std::move(first_cells), GuardedPages(cells * sizeof(Cell), 0)});
    const auto buffer_begin = reinterpret_cast<uintptr_t>(buffer.data);
    const uintptr_t end = max(begin + bytes, buffer_begin + buffer.bytes);
    begin = begin ? min(begin, buffer_begin) : buffer_begin;
    bytes = end - begin;
}

BlockClock GlobalRaces::post(uint32_t block, BlockClock& clock) {
    BlockClock posted = clock;
    clock[block] = ++latest;
    return posted;
}

void GlobalRaces::take(BlockClock& clock, const BlockClock& posted) const {
    for (const auto& [block, stamp] : posted) clock[block] = max(clock[block], stamp);
}

// An access that ends outside of the buffer is reported when it traps.
template <typename Function>
inline void GlobalRaces::for_each_cell(const void* address, size_t bytes, Function function) {
    const auto* first = static_cast<const std::byte*>(address);
    for (const Watched& watched : all) {
        const ptrdiff_t offset = first - watched.buffer.data;
        if (offset < 0 || size_t(offset) >= watched.buffer.bytes) continue;
        const std::vector<Segment>& segments = watched.buffer.segments;
        const auto after = std::upper_bound(
            segments.begin(), segments.end(), offset,
            [](ptrdiff_t offset, const Segment& segment) { return offset < segment.offset; });
        const Segment& segment = after[-1];
        const size_t in_segment = offset - segment.offset;
        Cell* cells = reinterpret_cast<Cell*>(watched.pages.begin()) +
                      watched.first_cells[&segment - segments.data()];
        const size_t end = min(in_segment + bytes, size_t(segment.bytes));
        for (size_t at = in_segment / GRANULE_BYTES; at * GRANULE_BYTES < end; ++at)
            function(cells[at], watched.buffer.begin(segment) + at * GRANULE_BYTES);
        return;
    }
}

bool GlobalRaces::ordered(Event earlier) const {
    if (earlier.stamp <= launch_began) return true;
    if (earlier.kind == REDUCTION || earlier.kind == TICKET) return false;
    const BlockClock& clock = Worker::current()->block_clock();
    const auto known = clock.find(earlier.block);
    return known != clock.end() && earlier.stamp <= known->second;
}

void GlobalRaces::access(Access access, const void* address, size_t bytes, Place place) {
    require_kernel_wait(access, address, place);
    const uint32_t block = blockIdx.x;
    const Stamp stamp = Worker::current()->block_clock()[block];
    for_each_cell(address, bytes, [&](Cell& cell, const std::byte* at) {
        if (access == WRITE) {
            require_order(cell.write.event.exchange({block, stamp, STORE}, RELAXED), cell.write,
                          "writes", at, place);
            require_order(cell.read.event.load(RELAXED), cell.read, "writes", at, place);
            cell.write.place.store(place, RELAXED);
        } else {
            require_order(cell.write.event.load(RELAXED), cell.write, "reads", at, place);
            cell.read.event.store({block, stamp, LOAD}, RELAXED);
            cell.read.place.store(place, RELAXED);
        }
    });
}

void GlobalRaces::add(Kind kind, const void* address, size_t bytes, Place place) {
    require_kernel_wait(WRITE, address, place);
    const uint32_t block = blockIdx.x;
    const Stamp stamp = Worker::current()->block_clock()[block];
    const char* const does = kind == TICKET ? "takes a ticket from" : "adds to";
    for_each_cell(address, bytes, [&](Cell& cell, const std::byte* at) {
        require_order(cell.read.event.load(RELAXED), cell.read, does, at, place);
        const Event own = cell.write.event.load(RELAXED);
        if (own.block == block && own.stamp > launch_began && own.kind == STORE) return;
        const Event earlier = cell.write.event.exchange({block, stamp, kind}, RELAXED);
        if (earlier.kind != kind) require_order(earlier, cell.write, does, at, place);
        cell.write.place.store(place, RELAXED);
    });
}

void GlobalRaces::require_kernel_wait(Access access, const void* address, Place place) {
    if (Worker::current()->has_waited_for_kernels()) return;
    for_each_cell(address, 1, [&](Cell&, const std::byte*) {
        Report report = Worker::current()->fault("access before griddepcontrol_wait");
        place.describe(report);
        report.add(": %s ", access == WRITE ? "writes" : "reads");
        describe_address(report, static_cast<const std::byte*>(address));
        report
            .add(
                ", which the kernels in front may still %s; only inputs are safe before the "
                "thread executes griddepcontrol_wait, or comes to a barrier after another thread "
                "of its block that has",
                access == WRITE ? "read or write" : "write")
            .fail();
    });
}

void GlobalRaces::require_order(Event earlier, const Last& last, const char* does,
                                const std::byte* address, Place place) const {
    constexpr const char* HAS[] = {"written", "read", "added to", "taken a ticket from"};
    constexpr const char* WHY[] = {", and no signal orders the two",
                                   ", and no signal orders the two",
                                   "; the sum is there when the launch has ended",
                                   "; until the launch has ended the counter is for tickets alone"};
    if (ordered(earlier)) return;
    Report report = Worker::current()->fault("data race between blocks");
    place.describe(report);
    report.add(": %s what block %u has %s", does, earlier.block, HAS[earlier.kind]);
    last.place.load(RELAXED).describe(report);
    report.add(", ");
    describe_address(report, address);
    report.add("%s", WHY[earlier.kind]).fail();
}

}  // namespace simt
