#include "races.h"

#include "global_races.h"
#include "scheduler.h"
#include "trap.h"

namespace simt {
namespace {

constexpr Epoch LAST_EPOCH = 1 << 30;  // of a block's beginning

// For maxima of clocks, in vector instructions whatever the flags.
typedef Epoch EpochVector __attribute__((vector_size(16)));
constexpr size_t VECTOR = sizeof(EpochVector) / sizeof(Epoch);

void join(Epoch* to, const Epoch* from, size_t size) {
    for (size_t i = 0; i < size; i += VECTOR) {
        auto* mine = reinterpret_cast<EpochVector*>(to + i);
        const auto theirs = *reinterpret_cast<const EpochVector*>(from + i);
        *mine = *mine > theirs ? *mine : theirs;
    }
}

// Of the epochs of a warp's lanes, how many are not before this one.
int count_from(const Epoch* lanes, Epoch epoch) {
    EpochVector counts = {};
    for (size_t i = 0; i < WARP_SIZE; i += VECTOR)  // true is -1
        counts -= *reinterpret_cast<const EpochVector*>(lanes + i) >= epoch;
    int count = 0;
    for (size_t i = 0; i < VECTOR; ++i) count += counts[i];
    return count;
}

// The shared memory of the running block; none outside of one.
constinit thread_local uintptr_t tracked_begin = 0;
constinit thread_local size_t tracked_bytes = 0;

}  // namespace

void Place::describe(Report& report) const {
    const auto address = [](int32_t distance) {
        return reinterpret_cast<uintptr_t>(&ORIGIN) + distance;
    };
    const int32_t upper = bits >> 32, lower = static_cast<int32_t>(bits) >> 1;
    if (bits & 1) {
        const Site site = {reinterpret_cast<const char*>(address(upper)), lower};
        report.add(" (%s:%d)", site.file_name(), site.line);
    } else {
        describe_calls(report, {address(upper), address(lower)});
    }
}

ClusterClocks::ClusterClocks(int blocks, int threads)
    : blocks(blocks),
      stride(blocks * round_up(threads, WARP_SIZE)),
      pages(size_t(stride) * stride * sizeof(Epoch), 0),
      clocks(reinterpret_cast<Epoch*>(pages.begin())) {}

Races::Races(const Buffer& smem, int num_threads, const int& running_thread, ClusterClocks& clocks,
             int rank)
    : clocks(clocks),
      num_threads(num_threads),
      first_thread(clocks.first_thread(rank)),
      running_thread(running_thread),
      smem_bytes(smem.bytes),
      num_lines(smem.bytes / LINE_BYTES + 1),
      smem_begin(reinterpret_cast<uintptr_t>(smem.data)),
      line_pages(num_lines * sizeof(Line), 0),
      granule_pages(num_lines * GRANULES * sizeof(Event), 0),
      lines(reinterpret_cast<Line*>(line_pages.begin())),
      granules(reinterpret_cast<Event*>(granule_pages.begin())),
      current(num_threads),
      warp_known(num_threads / WARP_SIZE + 1) {}

Races::~Races() { tracked_bytes = 0; }

void Races::begin_block() {
    // What the blocks of a cluster know of each other is forgotten each time.
    if (latest > LAST_EPOCH || clocks.blocks > 1) {
        memset(clock_of(0), 0, num_threads * clocks.stride * sizeof(Epoch));
        memset(line_pages.begin(), 0, line_pages.end() - line_pages.begin());
        for (Epoch& known : warp_known) known = 0;
        latest = 0;
    }
    arrivals.clear();
    copies_out.clear();
    order_block();
    waits.clear();
    after_wait.assign(num_threads, false);
}

void Races::become_current() const {
    tracked_begin = smem_begin;
    tracked_bytes = smem_bytes;
}

void Races::share_clocks() {
    joined.assign(clocks.stride, 0);
    for (int i = 0; i < num_threads; ++i) join(joined.data(), clock_of(i), clocks.stride);
    for (int i = 0; i < num_threads; ++i) joined[first_thread + i] = latest;
    for (int i = 0; i < num_threads; ++i)
        memcpy(clock_of(i), joined.data(), clocks.stride * sizeof(Epoch));
}

void Races::order_block() {
    if (clocks.blocks > 1) share_clocks();
    block_known = latest++;
    for (Epoch& epoch : current) epoch = latest;
}

void Races::order_lanes(int first_lane, uint32_t mask) {
    const int lanes = min(WARP_SIZE, num_threads - first_lane);
    const auto for_each_lane = [&](auto function) {
        for (int lane = 0; lane < lanes; ++lane)
            if (mask >> lane & 1) function(first_lane + lane);
    };
    joined.assign(clocks.stride, 0);
    for_each_lane([&](int thread) { join(joined.data(), clock_of(thread), clocks.stride); });
    for_each_lane([&](int thread) { joined[first_thread + thread] = current[thread]; });
    if (mask == ALL_LANES >> (WARP_SIZE - lanes)) warp_known[first_lane / WARP_SIZE] = latest;
    ++latest;
    for_each_lane([&](int thread) {
        memcpy(clock_of(thread), joined.data(), clocks.stride * sizeof(Epoch));
        current[thread] = latest;
    });
}

void Races::release(int thread, Handover& barrier) {
    barrier.arrived.resize(clocks.stride);
    join(barrier.arrived.data(), clock_of(thread), clocks.stride);
    barrier.arrived[first_thread + thread] = current[thread];
    current[thread] = ++latest;
}

void Races::acquire(int thread, const Handover& barrier) {
    join(clock_of(thread), barrier.completed.data(), barrier.completed.size());
}

// An access that ends outside of shared memory is reported when it traps.
template <typename Function>
inline void Races::for_each_piece(size_t offset, size_t bytes, Function function) {
    for (const size_t end = min(offset + bytes, smem_bytes); offset < end;) {
        const size_t line = offset / LINE_BYTES, begin = line * LINE_BYTES;
        const size_t piece_end = min(begin + LINE_BYTES, end);
        function(
            Piece{line, static_cast<int>(offset - begin), static_cast<int>(piece_end - begin)});
        offset = piece_end;
    }
}

void Races::access(Access access, size_t offset, size_t bytes, Place place) {
    access == WRITE ? write(offset, bytes, now(place)) : read(offset, bytes, now(place));
}

// One epoch for all lanes.
void Races::begin_warp_access() {
    ++latest;
    const int first_lane = running_thread / WARP_SIZE * WARP_SIZE;
    for (int lane = 0; lane < WARP_SIZE; ++lane) current[first_lane + lane] = latest;
}

void Races::access_by_warp(Access access, size_t offset, size_t bytes, uint16_t mapping,
                           Site site) {
    const Event event = {current[running_thread], own_warp(mapping), site};
    access == WRITE ? write(offset, bytes, event) : read(offset, bytes, event);
}

void Races::read_by_warp(size_t offset, size_t bytes, Site site) {
    read(offset, bytes, {current[running_thread], own_warp(0, true), site});
}

void Races::start_copy(const Races& from, size_t offset, size_t bytes, Site site) {
    const Event event = from.now(site);
    for_each_piece(offset, bytes, [&](Piece piece) {
        compare_with_writes(piece, WRITE, event);
        compare_with_reads(piece, event);
        if (!piece.is_whole()) return;  // a box has whole lines
        Line& line = lines[piece.line];
        line.written.epoch = line.read.epoch = 0;
        line.is_split = false;
    });
}

bool Races::after_kernel_wait() {
    if (after_wait[running_thread]) return true;
    for (const Event& wait : waits)
        if (wait.epoch <= block_known || ordered(wait, self()))
            return after_wait[running_thread] = true;
    return false;
}

void Races::read_from(const Races& other, size_t offset, size_t bytes, Site site) {
    const Event event = other.now(site);
    for_each_piece(offset, bytes, [&](Piece piece) { compare_with_writes(piece, READ, event); });
}

void Races::note_arrival(const Races& other, Site site) {
    const Event event = other.now(site);
    std::erase_if(arrivals, [&](const Event& arrival) { return arrival.party == event.party; });
    arrivals.push_back(event);
}

void Races::start_copy_out(const CopyOut& copy) {
    std::erase_if(copies_out, [&](const CopyOut& earlier) {
        return earlier.rank == copy.rank && earlier.mbarrier == copy.mbarrier;
    });
    copies_out.push_back(copy);
}

void Races::note_wait(const Races& other, int rank, size_t mbarrier, uint32_t phase) {
    const Event event = other.now(Site());
    for (CopyOut& copy : copies_out) {
        if (copy.rank == rank && copy.mbarrier == mbarrier && copy.phase <= phase)
            copy.waits.insert({event.party.thread, event.epoch});
    }
}

bool Races::knows(int thread, Epoch epoch) const {
    for (int i = 0; i < num_threads; ++i)
        if (clock_of(i)[thread] >= epoch) return true;
    return false;
}

void Races::require_end_is_last() const {
    constexpr const char* REMEDY = ": cluster_arrive, then cluster_wait, in all blocks";
    const int threads_per_block = clocks.stride / clocks.blocks;
    for (const Event& arrival : arrivals) {
        const int thread = arrival.party.thread;
        if (knows(thread, arrival.epoch)) continue;
        Report report = Worker::current()->fault("block ends before an arrival");
        report.add(": thread %d of rank %d arrives at one of its mbarriers",
                   thread % threads_per_block, thread / threads_per_block);
        arrival.place.describe(report);
        report.add(", which nothing orders before the end%s", REMEDY).fail();
    }
    for (const CopyOut& copy : copies_out) {
        bool has_landed = false;
        for (const auto& [thread, epoch] : copy.waits) has_landed |= knows(thread, epoch);
        if (has_landed) continue;
        Worker::current()
            ->fault("block ends before a copy")
            .add(
                ": %s (%s:%d) to rank %d reads its shared memory, and nothing orders the wait for "
                "the mbarrier there before the end%s",
                copy.name, copy.site.file_name(), copy.site.line, copy.rank, REMEDY)
            .fail();
    }
}

bool Races::ordered(const Event& earlier, Party party) const {
    const Party other = earlier.party;
    if (other == party) return true;
    if (other.thread / WARP_SIZE == party.thread / WARP_SIZE &&
        earlier.epoch <= warp_known[(party.thread - first_thread) / WARP_SIZE])
        return true;
    const int lanes = other.is_warp ? WARP_SIZE : 1;
    const int needed = other.as_a_whole ? 1 : lanes;
    for (int i = 0; i < (party.is_warp ? WARP_SIZE : 1); ++i) {
        const Epoch* clock = clocks.of(party.thread + i) + other.thread;
        // A thread's own epoch in its clock may be late.
        const int self = party.thread + i - other.thread;
        const bool is_among = self >= 0 && self < lanes;
        int known = is_among && clock[self] < earlier.epoch;
        known += other.is_warp ? count_from(clock, earlier.epoch) : *clock >= earlier.epoch;
        if (known < needed) return false;
    }
    return true;
}

inline void Races::compare_with_writes(Piece piece, Access access, Event event) const {
    const Line& line = lines[piece.line];
    const Epoch known = known_to(event.party);
    if (line.written.epoch <= known) return;
    const Event* compared = nullptr;
    for (size_t i = piece.first / GRANULE_BYTES; i * GRANULE_BYTES < size_t(piece.end); ++i) {
        const Event& write = line.is_split ? granules[piece.line * GRANULES + i] : line.written;
        if (write.epoch <= known) continue;
        if (compared && write.epoch == compared->epoch && write.party == compared->party) continue;
        if (!ordered(write, event.party))
            report(WRITE, write, piece.line * LINE_BYTES + i * GRANULE_BYTES, access, event);
        compared = &write;
    }
}

inline void Races::compare_with_reads(Piece piece, Event event) const {
    const Line& line = lines[piece.line];
    if (line.read.epoch > known_to(event.party) && line.read_bytes & piece.bytes() &&
        !ordered(line.read, event.party))
        report(READ, line.read, piece.line * LINE_BYTES + piece.first, WRITE, event);
}

void Races::read(size_t offset, size_t bytes, Event event) {
    for_each_piece(offset, bytes, [&](Piece piece) {
        compare_with_writes(piece, READ, event);
        Line& line = lines[piece.line];
        const bool again = line.read.epoch == event.epoch && line.read.party == event.party;
        line.read_bytes = piece.bytes() | (again ? line.read_bytes : 0);
        line.read = event;
    });
}

void Races::write(size_t offset, size_t bytes, Event event) {
    for_each_piece(offset, bytes, [&](Piece piece) {
        compare_with_writes(piece, WRITE, event);
        compare_with_reads(piece, event);
        Line& line = lines[piece.line];
        if (piece.is_whole()) {
            line.written = event;
            line.is_split = false;
        } else {
            write_granules(piece, event);
        }
    });
}

void Races::write_granules(Piece piece, Event event) {
    Line& line = lines[piece.line];
    Event* of_line = granules + piece.line * GRANULES;
    if (!line.is_split) {
        for (size_t i = 0; i < GRANULES; ++i) of_line[i] = line.written;
        line.is_split = true;
    }
    for (size_t i = (piece.first + GRANULE_BYTES - 1) / GRANULE_BYTES;
         i < piece.end / GRANULE_BYTES; ++i)
        of_line[i] = event;
    line.written.epoch = max(line.written.epoch, event.epoch);
}

void Races::report(Access earlier_access, const Event& earlier, size_t byte, Access access,
                   Event event) const {
    Report report = Worker::current()->fault("data race");
    event.place.describe(report);
    const int thread = earlier.party.thread - first_thread, warp = thread / WARP_SIZE;
    report.add(": %s byte %zu of ", access == WRITE ? "writes" : "reads", byte)
        .add(is_own(event.party) ? "shared memory, which " : "rank %d's shared memory, where ",
             clocks.blocks * first_thread / clocks.stride)
        .add(earlier.party.is_warp ? "warp %d has " : "thread %d has ",
             earlier.party.is_warp ? warp : thread)
        .add(earlier_access == WRITE ? "written" : "read");
    earlier.place.describe(report);
    report
        .add(", and nothing between the two orders memory, as %s does",
             !is_own(event.party) ? "a cluster barrier or an arrival from there"
             : warp == (event.party.thread - first_thread) / WARP_SIZE
                 ? "__syncwarp() or __syncthreads()"
                 : "__syncthreads(), a named barrier or an mbarrier")
        .add("; shuffles, votes and matrix instructions do not")
        .fail();
}

}  // namespace simt

// What the compiler calls before the accesses of a step. The frame pointer points to the caller's,
// which lies below the address that the caller returns to.
namespace {

inline __attribute__((always_inline)) void track_step(simt::Access access, const void* address,
                                                      size_t bytes, const void* code,
                                                      const void* frame) {
    const size_t offset = reinterpret_cast<uintptr_t>(address) - simt::tracked_begin;
    const bool is_shared = offset < simt::tracked_bytes;
    if (__builtin_expect(!is_shared && !simt::global_races.watches(address), 1)) return;
    const void* const* caller_frame = *static_cast<const void* const* const*>(frame);
    const simt::Place place = {code, caller_frame[1]};
    if (is_shared) {
        simt::Worker::current()->races().access(access, offset, bytes, place);
    } else {
        simt::global_races.access(access, address, bytes, place);
    }
}

}  // namespace

#define SIMT_TRACK(access, address, bytes)                                \
    track_step(simt::access, address, bytes, __builtin_return_address(0), \
               __builtin_frame_address(0))
#define SIMT_TSAN(bytes)                                                                         \
    void __tsan_read##bytes(const void* address) { SIMT_TRACK(READ, address, bytes); }           \
    void __tsan_write##bytes(void* address) { SIMT_TRACK(WRITE, address, bytes); }               \
    void __tsan_unaligned_read##bytes(const void* address) { SIMT_TRACK(READ, address, bytes); } \
    void __tsan_unaligned_write##bytes(void* address) { SIMT_TRACK(WRITE, address, bytes); }

extern "C" {
SIMT_TSAN(1)
SIMT_TSAN(2)
SIMT_TSAN(4)
SIMT_TSAN(8)
SIMT_TSAN(16)

void __tsan_read_range(const void* address, size_t bytes) { SIMT_TRACK(READ, address, bytes); }
void __tsan_write_range(void* address, size_t bytes) { SIMT_TRACK(WRITE, address, bytes); }

// Of clang++, which calls them instead of C's.
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
    SIMT_TRACK(READ, from, bytes);
    SIMT_TRACK(WRITE, to, bytes);
    return memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, size_t bytes) {
    SIMT_TRACK(READ, from, bytes);
    SIMT_TRACK(WRITE, to, bytes);
    return memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int byte, size_t bytes) {
    SIMT_TRACK(WRITE, to, bytes);
    return memset(to, byte, bytes);
}

void __tsan_init() {}
}
