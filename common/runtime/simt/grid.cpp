#include "grid.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <utility>

#include "cluster_blocks.h"
#include "trap.h"

namespace simt {
namespace {

constexpr uint64_t POSTED = 0x646574736f70;  // what a posted signal holds: "posted"

}  // namespace

Grid::Grid(const Launch& launch, BankCounter& banks)
    : launch(launch), banks(banks), order(launch.num_blocks / launch.cluster_size) {
    for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
    Random random(launch.seed);
    for (uint32_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
}

void Grid::run() {
    std::vector<std::thread> os_threads;
    {
        std::unique_lock lock(mutex);
        while (next < order.size() || num_running > 0) {
            if (next < order.size() && num_running < launch.num_workers) {
                ++num_running;
                try {
                    os_threads.emplace_back(&Grid::run_clusters, this, order[next++]);
                } catch (const std::system_error&) {
                    Report().add("cannot create an OS thread").fail();
                }
            } else {
                changed.wait(lock);
            }
        }
    }
    for (std::thread& os_thread : os_threads) os_thread.join();
    reduce();
    if (!posted.empty()) {
        const auto& [signal, post] = *posted.begin();
        Report report;
        report.add("signal never taken in kernel %s", launch.kernel_name);
        describe(report, *signal, post);
        report.add("; the next launch would take it").fail();
    }
}

void Grid::run_clusters(uint32_t number) {
    const TrapScope trap_scope;
    Cluster cluster(launch, *this);
    std::unique_lock lock(mutex, std::defer_lock);
    for (;;) {
        cluster.run(number);
        lock.lock();
        if (next == order.size() || ready_sleeper()) break;
        number = order[next++];
        lock.unlock();
    }
    for (Worker& block : cluster.blocks())
        if (block.banks()) banks.add(*block.banks());
    --num_running;
    wake_sleepers();
}

void Grid::post(uint64_t& signal, const Operation& operation) {
    const std::lock_guard lock(mutex);
    Worker& worker = *Worker::current();
    const uint32_t block = blockIdx.x;
    const Post post = {operation, block, worker.warp().first_thread,
                       global_races.post(block, worker.block_clock())};
    const auto [known, is_new] = posted.insert({&signal, post});
    if (!is_new) {
        Report report = operation_fault("signal posted twice", operation);
        describe(report, signal, known->second);
        report.add(", which nobody has taken since").fail();
    }
    signal = POSTED;
    wake_sleepers();
}

bool Grid::take(uint64_t& signal, const Operation& operation) {
    const std::lock_guard lock(mutex);
    const auto found = posted.find(&signal);
    if (found == posted.end()) return false;
    if (signal != POSTED) {
        Report report = operation_fault("signal overwritten", operation);
        report.add(" finds something else");
        describe(report, signal, found->second);
        report.fail();
    }
    signal = 0;
    global_races.take(Worker::current()->block_clock(), found->second.clock);
    posted.erase(found);
    return true;
}

bool Grid::begin_section(const int& counter, int place, const Operation& operation) {
    const std::lock_guard lock(mutex);
    if (counter < 0 || counter > place) {  // poison is -1
        Report report = operation_fault(
            counter < 0 ? "counter not set" : "place of an ended section", operation);
        report.add(" waits for place %d and finds %d ", place, counter);
        describe_address(report, reinterpret_cast<const std::byte*>(&counter));
        report.add("; a kernel in front must set the counter to 0, and each place is one warp's")
            .fail();
    }
    if (counter < place) return false;
    const auto ended = sections.find(&counter);
    if (ended != sections.end()) global_races.take(Worker::current()->block_clock(), ended->second);
    return true;
}

void Grid::end_section(int& counter, int place, const Operation& operation) {
    const std::lock_guard lock(mutex);
    if (counter != place) {
        Report report = operation_fault("counter overwritten", operation);
        report.add(" ends the section of place %d and finds %d ", place, counter);
        describe_address(report, reinterpret_cast<const std::byte*>(&counter));
        report.fail();
    }
    counter = place + 1;
    sections[&counter] = global_races.post(blockIdx.x, Worker::current()->block_clock());
    wake_sleepers();
}

void Grid::add(float* to, const float* x, size_t floats) {
    const std::lock_guard lock(mutex);
    if (Worker::current()->warp().section) {
        for (size_t i = 0; i < floats; ++i) to[i] += x[i];
        return;
    }
    std::vector<Reduction>& own = reductions[blockIdx.x];
    for (size_t i = 0; i < floats; ++i) own.push_back({to + i, x[i]});
}

void Grid::reduce() {
    std::vector<Reduction> all;
    for (const auto& [block, own] : reductions) all.insert(all.end(), own.begin(), own.end());
    Random random(mix(launch.seed));
    for (size_t i = all.size(); i > 1; --i) std::swap(all[i - 1], all[random.below(i)]);
    for (const Reduction& one : all) *one.to += one.x;
}

void Grid::sleep(bool is_behind) {
    Sleeper self = {Worker::current()->cluster(), is_behind};
    const AlarmElsewhere alarm_elsewhere;
    std::unique_lock lock(mutex);
    sleepers.push_back(&self);
    --num_running;
    wake_sleepers();
    changed.wait(lock, [&] { return self.awake; });
}

void Grid::wake(Sleeper& sleeper) {
    sleeper.awake = true;
    std::erase(sleepers, &sleeper);
    ++num_running;
}

bool Grid::has_come(const BlockWait& wait) const {
    return wait.signal ? posted.contains(wait.signal) : *wait.counter == wait.place;
}

Grid::Sleeper* Grid::ready_sleeper() const {
    for (Sleeper* sleeper : sleepers) {
        if (sleeper->is_behind) continue;
        for (const Worker& block : sleeper->cluster.blocks())
            for (const BlockWait& wait : block.block_waits())
                if (has_come(wait)) return sleeper;
    }
    return nullptr;
}

void Grid::wake_sleepers() {
    while (num_running < launch.num_workers) {
        Sleeper* const ready = ready_sleeper();
        if (!ready) break;
        wake(*ready);
    }
    if (num_running == 0 && next == order.size() && !sleepers.empty()) {
        const auto behind = std::find_if(sleepers.begin(), sleepers.end(),
                                         [](const Sleeper* sleeper) { return sleeper->is_behind; });
        if (behind == sleepers.end()) report_deadlock();
        wake(**behind);
    }
    changed.notify_all();
}

void Grid::describe(Report& report, const uint64_t& signal, const Post& post) const {
    report.add(": ");
    post.operation.describe(report);
    report.add(" in block %u, threads %d-%d, has posted the signal ", post.block, post.first_thread,
               post.first_thread + WARP_SIZE - 1);
    describe_address(report, reinterpret_cast<const std::byte*>(&signal));
}

void Grid::report_deadlock() const {
    Report report;
    report.add("deadlock between blocks in kernel %s: no block can go on", launch.kernel_name);
    for (const Sleeper* sleeper : sleepers) sleeper->cluster.describe_stall(report);
    report.fail();
}

}  // namespace simt
