#include "mbarrier.cuh"

#include "access.h"
#include "scheduler.h"

namespace simt {
namespace {

constexpr Mbarrier INITIALIZED = 0x726569727261626d;  // what an mbarrier holds in shared memory
constexpr int MAX_COUNT = (1 << 20) - 1;              // of arrivals and of bytes

// Its offset in shared memory.
size_t mbarrier_offset(const Mbarrier& barrier, const char* operation, Site site) {
    require_aligned(&barrier, 8, operation, site);
    return require_shared(&barrier, sizeof(barrier), operation, site);
}

// Ends the phase if no arrival and no byte is missing; its waiters go on.
void end_phase(MbarrierState& state, const char* operation, Site site) {
    if (state.pending > 0 || state.bytes > 0) return;
    if (state.bytes < 0) {
        Report report = operation_fault("more bytes than announced", {operation, site});
        report.add(" ends phase %u of ", state.phase);
        state.name(report);
        report.add(" over by %lld bytes", static_cast<long long>(-state.bytes)).fail();
    }
    ++state.phase;
    state.handover.complete_phase();
    state.pending = state.count;
    Worker& worker = *Worker::current();
    for (int i = 0; i < worker.block().num_threads; ++i) {
        const Thread& thread = worker.thread(i);
        if (thread.state == Thread::WAITING && thread.operation.mbarrier == int(state.offset))
            worker.make_runnable(i);
    }
}

// The running thread's arrival, which announces `bytes`.
void arrive(const Mbarrier& barrier, int bytes, const char* operation, Site site) {
    MbarrierState& state = find_mbarrier(barrier, operation, site);
    track(READ, &barrier, sizeof(barrier), site);
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
    Worker& worker = *Worker::current();
    worker.races().release(worker.running_thread(), state.handover);
    --state.pending;
    state.bytes += bytes;
    const uint64_t key = mix(mix(site.line, state.offset), state.phase);
    end_phase(state, operation, site);
    worker.may_fall_behind(key);
}

}  // namespace

MbarrierState& find_mbarrier(const uint64_t& barrier, const char* operation, Site site) {
    const size_t offset = mbarrier_offset(barrier, operation, site);
    auto& mbarriers = Worker::current()->mbarriers();
    const auto found = mbarriers.find(offset);
    if (found == mbarriers.end()) {
        operation_fault("mbarrier not initialized", {operation, site})
            .add(" needs an mbarrier_init before, of byte %zu of shared memory", offset)
            .fail();
    }
    if (barrier != INITIALIZED) {
        Report report = operation_fault("mbarrier overwritten", {operation, site});
        report.add(" finds something else in ");
        found->second.name(report);
        report.fail();
    }
    return found->second;
}

void complete_bytes(const uint64_t& barrier, int bytes, const char* operation, Site site) {
    MbarrierState& state = find_mbarrier(barrier, operation, site);
    state.bytes -= bytes;
    end_phase(state, operation, site);
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
    simt::arrive(barrier, 0, "mbarrier_arrive", site);
}

void mbarrier_arrive_expect_tx(Mbarrier& barrier, int bytes, simt::Site site) {
    simt::arrive(barrier, bytes, "mbarrier_arrive_expect_tx", site);
}

bool mbarrier_try_wait_parity(Mbarrier& barrier, int parity, simt::Site site) {
    simt::Worker& worker = *simt::Worker::current();
    const simt::MbarrierState& state =
        simt::find_mbarrier(barrier, "mbarrier_try_wait_parity", site);
    simt::track(simt::READ, &barrier, sizeof(barrier), site);
    if (parity != 0 && parity != 1) {
        simt::operation_fault("wrong parity", {"mbarrier_try_wait_parity", site})
            .add(" takes a parity of 0 or 1, not %d", parity)
            .fail();
    }
    // The lanes of a warp fail together: were failures drawn lane by lane, those that do wait would
    // hold the others back at the warp's next collective. The first attempt fails in one of two
    // runs, so that no wait without a loop passes both.
    simt::Thread& self = worker.self();
    const uint32_t phase = state.in_phase_of(parity) ? state.phase : state.phase - 1;
    const uint64_t key = simt::mix(simt::mix(site.line, state.offset), phase);
    self.wait_attempts = key == self.wait_key ? self.wait_attempts + 1 : 0;
    self.wait_key = key;
    if (self.wait_attempts == 0 ? worker.in_this_run(key)
                                : worker.once_in_for_warp(4, simt::mix(key, self.wait_attempts)))
        return false;
    if (state.in_phase_of(parity)) {
        const simt::Operation operation = {.name = "mbarrier_try_wait_parity",
                                           .site = site,
                                           .mbarrier = static_cast<int>(state.offset),
                                           .parity = parity};
        worker.start_waiting(operation, nullptr);
        worker.yield();
    }
    // Now and then one lane looks late: if the others let the next phase end meanwhile, it has missed
    // its own.
    if (worker.once_in_for_warp(8, simt::mix(key, 0)) &&
        simt::lane_id() == int(simt::mix(key) % simt::WARP_SIZE))
        worker.straggle();
    if (state.in_phase_of(parity)) return false;
    worker.races().acquire(worker.running_thread(), state.handover);
    return true;
}
