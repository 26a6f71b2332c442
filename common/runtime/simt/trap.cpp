#include "trap.h"

#include <pthread.h>
#include <sys/ucontext.h>

#include "scheduler.h"

namespace simt {
namespace {

int time_limit_s;  // of the process

// The buffer that an address lies in, or whose guard pages it lies in; nullptr where there is none.
const Buffer* find_buffer(const std::byte* address) {
    const Worker* worker = Worker::current();
    if (worker && worker->shared_memory().guards(address)) return &worker->shared_memory();
    for (const Buffer& buffer : global_buffers) {
        if (buffer.guards(address)) return &buffer;
    }
    return nullptr;
}

[[noreturn]] void report_access(const Worker& worker, const std::byte* address, bool write) {
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

// Whether the trapped access was a write.
bool trapped_on_write(const void* context) {
    [[maybe_unused]] const auto* machine = static_cast<const ucontext_t*>(context);
#if defined(__linux__) && defined(__x86_64__)
    return machine->uc_mcontext.gregs[REG_ERR] & 2;
#elif defined(__linux__) && defined(__aarch64__)
    // The exception syndrome is one of the records after the registers; its bit 6 says write.
    const auto* record = reinterpret_cast<const _aarch64_ctx*>(machine->uc_mcontext.__reserved);
    while (record->magic && record->magic != ESR_MAGIC) {
        record = reinterpret_cast<const _aarch64_ctx*>(reinterpret_cast<const char*>(record) +
                                                       record->size);
    }
    return record->magic && reinterpret_cast<const esr_context*>(record)->esr & 1 << 6;
#elif defined(__APPLE__) && defined(__x86_64__)
    return machine->uc_mcontext->__es.__err & 2;
#elif defined(__APPLE__) && defined(__aarch64__)
    return machine->uc_mcontext->__es.__esr & 1 << 6;
#else
#error "add how this platform tells a trapped read from a trapped write"
#endif
}

void handle_signal(int signal, siginfo_t* info, void* context) {
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

}  // namespace

void describe_address(Report& report, const std::byte* address) {
    if (const Buffer* buffer = find_buffer(address)) {
        buffer->describe(report, address);
    } else if (reinterpret_cast<uintptr_t>(address) < page_bytes()) {
        report.add("through a null pointer");
    } else {
        report.add("at address %p, in or near no buffer", static_cast<const void*>(address));
    }
}

void install_traps(int limit_s) {
    time_limit_s = limit_s;
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

}  // namespace simt

// Hooks of the sanitizers, which nothing calls in other builds. They know the line; the place in the
// grid is added.
extern "C" void __asan_on_error() {
    if (const simt::Worker* worker = simt::Worker::current())
        worker->fault("sanitizer error").add("\n").print();
}
extern "C" void __ubsan_on_report() { __asan_on_error(); }

// Leaks mean nothing in a program that runs once, and a second stack for each fiber costs too much.
extern "C" const char* __asan_default_options() {
    return "detect_leaks=0:detect_stack_use_after_return=0";
}
