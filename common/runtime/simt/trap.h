// Turns signals and sanitizer errors into reports that name the buffer, the kernel, the block and
// the thread.
#pragma once
#include <signal.h>

#include <initializer_list>
#include <vector>

#include "memory.h"

namespace simt {

// The buffers that a kernel's parameter points to; constant while kernels run.
inline std::vector<Buffer> global_buffers;

// Adds which buffer, or whose guard pages, an address lies in.
void describe_address(Report& report, const std::byte* address);

// Adds " <code 0x12 0x34>": calls that lead to some place, innermost first, as offsets in the
// program. common/runtime/cpu.py replaces them by a line of the step.
void describe_calls(Report& report, std::initializer_list<uintptr_t> return_addresses);

// Call once, before the process creates OS threads. The time limit counts from here; its signal,
// which also prints the progress of long launches, goes to an OS thread that runs a kernel, since
// all others block it.
void install_traps(int time_limit_s);

// Lives while an OS thread runs kernels. Gives signal handlers a stack of their own, since the
// fiber's may have overflowed.
class TrapScope {
  public:
    TrapScope() : pages(STACK_BYTES, page_bytes()) {
        stack_t stack = {};
        stack.ss_sp = pages.begin();
        stack.ss_size = STACK_BYTES;
        sigaltstack(&stack, &previous_stack);

        sigset_t none;
        sigemptyset(&none);
        pthread_sigmask(SIG_SETMASK, &none, &previous_mask);
    }
    ~TrapScope() {
        pthread_sigmask(SIG_SETMASK, &previous_mask, nullptr);
        sigaltstack(&previous_stack, nullptr);
    }
    TrapScope(const TrapScope&) = delete;
    TrapScope& operator=(const TrapScope&) = delete;

  private:
    static constexpr size_t STACK_BYTES = size_t{1} << 16;
    GuardedPages pages;
    stack_t previous_stack;
    sigset_t previous_mask;
};

// Lives while an OS thread that runs kernels sleeps: the time limit's signal goes to another one.
class AlarmElsewhere {
  public:
    AlarmElsewhere() {
        sigset_t alarm_only;
        sigemptyset(&alarm_only);
        sigaddset(&alarm_only, SIGALRM);
        pthread_sigmask(SIG_BLOCK, &alarm_only, &previous_mask);
    }
    ~AlarmElsewhere() { pthread_sigmask(SIG_SETMASK, &previous_mask, nullptr); }
    AlarmElsewhere(const AlarmElsewhere&) = delete;
    AlarmElsewhere& operator=(const AlarmElsewhere&) = delete;

  private:
    sigset_t previous_mask;
};

}  // namespace simt
