#include "mbarrier.cuh"

#include "access.h"
#include "cluster.cuh"
#include "cluster_blocks.h"

namespace simt {
namespace {

constexpr Mbarrier INITIALIZED = 0x726569727261626d;  // what an mbarrier holds in shared memory
constexpr int MAX_COUNT = (1 << 20) - 1;              // of arrivals and of bytes

// Its offset in shared memory.
size_t mbarrier_offset(const Mbarrier& barrier, const char* operation, Site site) {
    require_aligned(&barrier, 8, operation, site);
    return require_shared(&barrier, sizeof(barrier), operation, site);
}

// Ends the phase if no arrival and no byte is missing; its waiters, of the block that the mbarrier
// belongs to, go on.
void end_phase(Worker& block, MbarrierState& state, const char* operation, Site site) {
    if (state.pending > 0 || state.bytes > 0) return;
    if (state.bytes < 0) {
        Report report = operation_fault("more bytes than announced", {operation, site});
        report.add(" ends phase %u of ", state.phase);
        state.name(report);
        report.add(" over by %lld bytes", static_cast<long long>(-state.bytes)).fail();
    }
    ++state.phase;
    state.handover.complete_phase();
    state.blocks.complete_phase();
    state.pending = state.count;
    for (int i = 0; i < block.block().num_threads; ++i) {
        const Thread& thread = block.thread(i);
        if (thread.state == Thread::WAITING && thread.operation.mbarrier == int(state.offset))
            block.make_runnable(i);
    }
}

// The running thread's arrival at an mbarrier of the block, which announces `bytes`.
void arrive(Worker& block, const Mbarrier& barrier, int bytes, const char* operation, Site site) {
    MbarrierState& state = use_mbarrier(block, barrier, operation, site);
    Worker& worker = *Worker::current();
    if (&block != &worker) block.races().note_arrival(worker.races(), site);
    if (state.pending == 0) {
        Report report = operation_fault("too many arrivals", {operation, site});
        report.add(" is arrival %d in a phase of %d of ", state.count + 1, state.count);
        state.describe(report);
        report.fail();
    }
    if (bytes < 0 || bytes > MAX_COUNT) {
        operation_fault("wrong number of bytes", {operation, site})
            .add(" can announce 0 to %d bytes, not %d", MAX_COUNT, bytes)
            .fail();
    }
    worker.races().release(worker.running_thread(), state.handover);
    --state.pending;
    state.bytes += bytes;
    const uint64_t key = mix(mix(site.line, state.offset), state.phase);
    end_phase(block, state, operation, site);
    worker.may_fall_behind(key);
}

bool try_wait(const Mbarrier& barrier, int parity, const char* name, Site site) {
    Worker& worker = *Worker::current();
    const MbarrierState& state = use_mbarrier(worker, barrier, name, site);
    if (parity != 0 && parity != 1) {
        operation_fault("wrong parity", {name, site})
            .add(" takes a parity of 0 or 1, not %d", parity)
            .fail();
    }
    // The lanes of a warp fail together: were failures drawn lane by lane, those that do wait would
    // hold the others back at the warp's next collective. The first attempt fails in one of two
    // runs, so that no wait without a loop passes both.
    Thread& self = worker.self();
    const uint32_t phase = state.in_phase_of(parity) ? state.phase : state.phase - 1;
    const uint64_t key = mix(mix(site.line, state.offset), phase);
    self.wait_attempts = key == self.wait_key ? self.wait_attempts + 1 : 0;
    self.wait_key = key;
    if (self.wait_attempts == 0 ? worker.in_this_run(key)
                                : worker.once_in_for_warp(4, mix(key, self.wait_attempts)))
        return false;
    if (state.in_phase_of(parity)) {
        const Operation operation = {.name = name,
                                     .site = site,
                                     .mbarrier = static_cast<int>(state.offset),
                                     .parity = parity};
        worker.start_waiting(operation, nullptr);
        worker.yield();
    }
    // Now and then one lane looks late: if the others let the next phase end meanwhile, it has
    // missed its own.
    if (worker.once_in_for_warp(8, mix(key, 0)) && lane_id() == int(mix(key) % WARP_SIZE))
        worker.straggle();
    if (state.in_phase_of(parity)) return false;
    worker.races().acquire(worker.running_thread(), state.handover);
    for (Worker& block : worker.cluster().blocks())
        block.races().note_wait(worker.races(), worker.rank(), state.offset, state.phase - 1);
    return true;
}

}  // namespace

MbarrierState& find_mbarrier(Worker& block, const uint64_t& barrier, const char* operation,
                             Site site) {
    const size_t offset = mbarrier_offset(barrier, operation, site);
    auto& mbarriers = block.mbarriers();
    const auto found = mbarriers.find(offset);
    if (found == mbarriers.end()) {
        Report report = operation_fault("mbarrier not initialized", {operation, site});
        report.add(" needs an mbarrier_init before, of byte %zu of shared memory", offset);
        if (block.index() != blockIdx.x)
            report.add(" in block %u, and a cluster barrier between the two", block.index());
        report.fail();
    }
    if (memcmp(block.shared_memory().data + offset, &INITIALIZED, sizeof(INITIALIZED))) {
        Report report = operation_fault("mbarrier overwritten", {operation, site});
        report.add(" finds something else in ");
        found->second.name(report);
        report.fail();
    }
    return found->second;
}

MbarrierState& use_mbarrier(Worker& block, const uint64_t& barrier, const char* operation,
                            Site site) {
    MbarrierState& state = find_mbarrier(block, barrier, operation, site);
    Worker& worker = *Worker::current();
    if (&block == &worker) {
        track(READ, &barrier, sizeof(barrier), site);
    } else {
        block.races().read_from(worker.races(), state.offset, sizeof(barrier), site);
    }
    return state;
}

void complete_bytes(const uint64_t& barrier, int bytes, const char* operation, Site site) {
    Worker& block = *Worker::current();
    MbarrierState& state = find_mbarrier(block, barrier, operation, site);
    state.bytes -= bytes;
    end_phase(block, state, operation, site);
}

}  // namespace simt

void mbarrier_init(Mbarrier& barrier, int count, simt::Site site) {
    simt::Worker& worker = *simt::Worker::current();
    const size_t offset = simt::mbarrier_offset(barrier, "mbarrier_init", site);
    if (count < 1 || count > simt::MAX_COUNT) {
        simt::operation_fault("wrong number of arrivals", {"mbarrier_init", site})
            .add(" takes a count of 1 to %d, not %d", simt::MAX_COUNT, count)
            .fail();
    }
    const simt::MbarrierState state = {
        .block = worker.index(),
        .site = site,
        .initializer = worker.running_thread(),
        .fenced = false,
        .offset = offset,
        .count = count,
        .pending = count,
    };
    const auto [known, is_new] = worker.mbarriers().insert({offset, state});
    if (!is_new) {
        simt::Report report =
            simt::operation_fault("mbarrier initialized twice", {"mbarrier_init", site});
        report.add(" finds ");
        known->second.describe(report);
        report.fail();
    }
    simt::track(simt::WRITE, &barrier, sizeof(barrier), site);
    barrier = simt::INITIALIZED;
}

void fence_mbarrier_init() {
    simt::Worker& worker = *simt::Worker::current();
    for (auto& [offset, state] : worker.mbarriers()) {
        if (state.initializer == worker.running_thread()) state.fenced = true;
    }
}

void mbarrier_arrive(Mbarrier& barrier, simt::Site site) {
    simt::arrive(*simt::Worker::current(), barrier, 0, "mbarrier_arrive", site);
}

void mbarrier_arrive_expect_tx(Mbarrier& barrier, int bytes, simt::Site site) {
    simt::arrive(*simt::Worker::current(), barrier, bytes, "mbarrier_arrive_expect_tx", site);
}

bool mbarrier_try_wait_parity(Mbarrier& barrier, int parity, simt::Site site) {
    return simt::try_wait(barrier, parity, "mbarrier_try_wait_parity", site);
}

void mbarrier_arrive_cluster(Mbarrier& barrier, int rank, simt::Site site) {
    constexpr const char* NAME = "mbarrier_arrive_cluster";
    simt::Worker& worker = *simt::Worker::current();
    simt::Worker& block = worker.cluster().block(rank, {NAME, site});
    simt::global_races.take(simt::find_mbarrier(block, barrier, NAME, site).blocks.arrived,
                            simt::global_races.post(worker.index(), worker.block_clock()));
    simt::arrive(block, barrier, 0, NAME, site);
}

void mbarrier_arrive_cluster_relaxed(Mbarrier& barrier, int rank, simt::Site site) {
    constexpr const char* NAME = "mbarrier_arrive_cluster_relaxed";
    simt::arrive(simt::Worker::current()->cluster().block(rank, {NAME, site}), barrier, 0, NAME,
                 site);
}

bool mbarrier_try_wait_parity_cluster(Mbarrier& barrier, int parity, simt::Site site) {
    constexpr const char* NAME = "mbarrier_try_wait_parity_cluster";
    if (!simt::try_wait(barrier, parity, NAME, site)) return false;
    simt::Worker& worker = *simt::Worker::current();
    simt::global_races.take(worker.block_clock(),
                            simt::find_mbarrier(worker, barrier, NAME, site).blocks.completed);
    return true;
}
