// Describes why no thread of a block can go on although not all have exited, and who waits where.
#pragma once
#include <map>
#include <vector>

#include "mbarrier_state.h"
#include "thread.h"

namespace simt {

// True if thread i waits in an operation of its warp whose mask contains thread j's lane.
inline bool waits_for(const std::vector<Thread>& threads, size_t i, size_t j) {
    return threads[i].state == Thread::WAITING && threads[i].operation.mask >> j % WARP_SIZE & 1;
}

inline const char* stall_reason(const std::vector<Thread>& threads) {
    for (size_t i = 0; i < threads.size(); ++i) {
        const size_t warp_start = i - i % WARP_SIZE;
        for (size_t j = warp_start; j < threads.size() && j < warp_start + WARP_SIZE; ++j) {
            if (!waits_for(threads, i, j)) continue;
            if (threads[j].state == Thread::EXITED) return "wait for a lane that has exited";
            if (!waits_for(threads, j, i)) continue;
            if (threads[i].operation.mask != threads[j].operation.mask) {
                return "lanes wait for each other with different masks";
            }
            if (threads[i].operation != threads[j].operation) {
                return "lanes wait for each other in different places";
            }
        }
    }
    const char* reason = "deadlock";
    for (const Thread& thread : threads) {
        if (thread.state != Thread::WAITING) continue;
        if (thread.operation.mbarrier >= 0 || !thread.payload) return "deadlock";
        if (!thread.operation.mask) reason = "barrier divergence";
    }
    return reason;
}

// Ascending numbers as "0-3, 7, 9-10".
inline void describe_ranges(Report& report, const std::vector<size_t>& numbers) {
    for (size_t first = 0, end; first < numbers.size(); first = end) {
        end = first + 1;
        while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
        report.add("%s%zu", first ? ", " : "", numbers[first]);
        if (end - first > 1) report.add("-%zu", numbers[end - 1]);
    }
}

// One line for each set of threads that wait for the same operation, one for those that have
// exited, one for each mbarrier that is waited for.
inline void describe_stall(Report& report, const std::vector<Thread>& threads,
                           const std::map<size_t, MbarrierState>& mbarriers) {
    const auto alike = [](const Thread& a, const Thread& b) {
        return a.state == b.state && (a.state == Thread::EXITED || a.operation == b.operation);
    };
    report.add(": no thread can go on");
    std::vector<bool> described(threads.size());
    for (size_t i = 0; i < threads.size(); ++i) {
        if (described[i]) continue;
        std::vector<size_t> numbers;
        for (size_t j = i; j < threads.size(); ++j) {
            if (!alike(threads[i], threads[j])) continue;
            numbers.push_back(j);
            described[j] = true;
        }
        const bool one = numbers.size() == 1;
        report.add("\n  thread%s ", one ? "" : "s");
        describe_ranges(report, numbers);
        if (threads[i].state == Thread::EXITED) {
            report.add(one ? " has exited" : " have exited");
        } else {
            report.add(one ? " waits at " : " wait at ");
            threads[i].operation.describe(report);
        }
    }
    for (const auto& [offset, mbarrier] : mbarriers) {
        for (const Thread& thread : threads) {
            if (thread.state != Thread::WAITING || thread.operation.mbarrier != int(offset))
                continue;
            report.add("\n  ");
            mbarrier.describe(report);
            if (mbarrier.bytes > 0) report.add(": no copy is on its way");
            break;
        }
    }
}

}  // namespace simt
