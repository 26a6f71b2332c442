// Turns signals and sanitizer errors into reports that name the buffer, the kernel, the block and
// the thread.
#pragma once
#include <signal.h>

#include <vector>

#include "memory.h"

namespace simt {

// The buffers that a kernel's parameter points to; does not change while kernels run.
inline std::vector<Buffer> global_buffers;

// Says of an address which buffer it lies in, or whose guard pages.
void describe_address(Report& report, const std::byte* address);

// For the process, before it makes any OS thread. The time limit counts from here; its signal, which
// now and then prints a line that says what runs, goes to an OS thread that is busy with a kernel,
// since all others block it.
void install_traps(int time_limit_s);

// For an OS thread while it runs kernels. Handlers get a stack of their own, as a fiber's may just
// have overflowed.
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

}  // namespace simt
