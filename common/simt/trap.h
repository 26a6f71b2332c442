// Turns signals and sanitizer errors into reports that name the buffer, the kernel, the block and
// the thread.
#pragma once
#include <pthread.h>
#include <signal.h>

#include "scheduler.h"

namespace simt {

// The buffers that a kernel's parameter points to; does not change while kernels run.
inline std::vector<Buffer> global_buffers;

inline int time_limit_s;  // of the process

// The buffer that an address lies in, or whose guard pages it lies in; nullptr where there is none.
inline const Buffer* find_buffer(const std::byte* address) {
    const Worker* worker = Worker::current();
    if (worker && worker->shared_memory().guards(address)) return &worker->shared_memory();
    for (const Buffer& buffer : global_buffers) {
        if (buffer.guards(address)) return &buffer;
    }
    return nullptr;
}

inline void describe_address(Report& report, const std::byte* address) {
    if (const Buffer* buffer = find_buffer(address)) {
        buffer->describe(report, address);
    } else if (reinterpret_cast<uintptr_t>(address) < page_bytes()) {
        report.add("through a null pointer");
    } else {
        report.add("at address %p, in or near no buffer", static_cast<const void*>(address));
    }
}

[[noreturn]] inline void report_access(const Worker& worker, const std::byte* address, bool write) {
    if (const int thread = worker.overflowed_stack(address); thread != Worker::NO_THREAD) {
        worker.fault("stack overflow")
            .add(": too many bytes of local variables in thread %d", thread)
            .fail();
    }
    const Buffer* buffer = find_buffer(address);
    const bool inside = buffer && buffer->contains(address);
    Report report = worker.fault(!write   ? "out-of-bounds read"
                                 : inside ? "write to an input"
                                          : "out-of-bounds write");
    report.add(": ");
    describe_address(report, address);
    worker.describe_progress(report);
    report.fail();
}

inline void handle_signal(int signal, siginfo_t* info, void* context) {
    const Worker* worker = Worker::current();
    if (!worker) Report().add("signal %d outside of a block", signal).fail();
    if (signal == SIGFPE) worker->fault("integer division by zero").fail();
    if (signal == SIGALRM) {
        Report report = worker->fault("time limit");
        report.add(": still running after %d s", time_limit_s);
        worker->describe_progress(report);
        report.fail();
    }
    report_access(*worker, static_cast<const std::byte*>(info->si_addr), trapped_on_write(context));
}

// For the process, before it makes any OS thread. The time limit counts from here; its signal goes
// to an OS thread that is busy with a kernel, since all others block it.
inline void install_traps() {
    struct sigaction action = {};
    action.sa_sigaction = handle_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGALRM}) sigaction(signal, &action, nullptr);

    sigset_t alarm_only;
    sigemptyset(&alarm_only);
    sigaddset(&alarm_only, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &alarm_only, nullptr);
    alarm(time_limit_s);
}

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

// The sanitizers know the line, these add the place in the grid. Hooks of theirs, which nothing
// calls in other builds.
extern "C" void __asan_on_error() {
    if (const simt::Worker* worker = simt::Worker::current())
        worker->fault("sanitizer error").add("\n").print();
}
extern "C" void __ubsan_on_report() { __asan_on_error(); }
