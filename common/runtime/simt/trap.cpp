#include "trap.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/ucontext.h>
#include <time.h>

#include <algorithm>

#include "scheduler.h"

namespace simt {
namespace {

constexpr int FIRST_PROGRESS_S = 5, PROGRESS_INTERVAL_S = 10;

int time_limit_s;  // of the process
double start_s;

double now_s() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

// The registers that say where a thread was interrupted.
struct CodeRegisters {
    uintptr_t pc, frame, stack;
    uintptr_t link;  // the return address of a function that has called none; 0 if on the stack
};

CodeRegisters code_registers(const void* context) {
    const auto* machine = static_cast<const ucontext_t*>(context);
#if defined(__linux__) && defined(__x86_64__)
    const greg_t* registers = machine->uc_mcontext.gregs;
    return {uintptr_t(registers[REG_RIP]), uintptr_t(registers[REG_RBP]),
            uintptr_t(registers[REG_RSP]), 0};
#elif defined(__linux__) && defined(__aarch64__)
    const auto& registers = machine->uc_mcontext;
    return {registers.pc, registers.regs[29], registers.sp, registers.regs[30]};
#elif defined(__APPLE__) && defined(__x86_64__)
    const auto& registers = machine->uc_mcontext->__ss;
    return {registers.__rip, registers.__rbp, registers.__rsp, 0};
#elif defined(__APPLE__) && defined(__aarch64__)
    const auto& registers = machine->uc_mcontext->__ss;
    return {registers.__pc, registers.__fp, registers.__sp, registers.__lr};
#else
#error "add where this platform keeps the registers of an interrupted thread"
#endif
}

// Where an object has been loaded, e.g. this program; nullptr for addresses in none.
const void* base_of(uintptr_t code) {
    Dl_info object;
    return dladdr(reinterpret_cast<const void*>(code), &object) ? object.dli_fbase : nullptr;
}

// Adds code of this program as its offset there.
void add_code(Report& report, uintptr_t code) {
    const auto program = reinterpret_cast<uintptr_t>(base_of(uintptr_t(&add_code)));
    if (uintptr_t(base_of(code)) == program) report.add(" 0x%zx", size_t(code - program));
}

// Adds where the running thread was interrupted and the calls that led there, as describe_calls()
// does. All is compiled with frame pointers: each points to the caller's, which lies below the
// return address. AddressSanitizer does not look: it may itself have been interrupted, while it marks
// the stack.
[[gnu::no_sanitize("address")]] void describe_code(Report& report, const Worker& worker,
                                                   const void* context) {
    constexpr int MAX_CALLS = 16;
    auto [pc, frame, stack, link] = code_registers(context);
    report.add(" <code");
    add_code(report, pc);
    if (base_of(pc) != base_of(uintptr_t(&describe_code))) {  // e.g. in memcpy
        if (!link && worker.on_stack(stack)) link = *reinterpret_cast<const uintptr_t*>(stack);
        add_code(report, link - 1);
    }
    for (int i = 0; i < MAX_CALLS && worker.on_stack(frame); ++i) {
        const auto* saved = reinterpret_cast<const uintptr_t*>(frame);
        add_code(report, saved[1] - 1);  // in the call, not after it
        if (saved[0] <= frame) break;
        frame = saved[0];
    }
    report.add(">");
}

// The buffer whose bytes or guard pages contain the address; nullptr if none.
const Buffer* find_buffer(const std::byte* address) {
    const Worker* worker = Worker::current();
    if (worker && worker->shared_memory().guards(address)) return &worker->shared_memory();
    for (const Buffer& buffer : global_buffers) {
        if (buffer.guards(address)) return &buffer;
    }
    return nullptr;
}

// True if the trapped access was a write.
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

[[noreturn]] void report_access(const Worker& worker, const std::byte* address,
                                const void* context) {
    if (const int thread = worker.overflowed_stack(address); thread != Worker::NO_THREAD) {
        Report report = worker.fault("stack overflow");
        describe_code(report, worker, context);
        report.add(": too many bytes of local variables in thread %d", thread).fail();
    }
    const bool write = trapped_on_write(context);
    const Buffer* buffer = find_buffer(address);
    const bool inside = buffer && buffer->contains(address);
    Report report = worker.fault(!write   ? "out-of-bounds read"
                                 : inside ? "write to an input"
                                          : "out-of-bounds write");
    describe_code(report, worker, context);
    report.add(": ");
    describe_address(report, address);
    worker.describe_progress(report);
    report.fail();
}

void handle_fault(int signal, siginfo_t* info, void* context) {
    const Worker* worker = Worker::current();
    if (!worker) Report().add("signal %d outside of a block", signal).fail();
    if (signal == SIGFPE) {
        Report report = worker->fault("integer division by zero");
        describe_code(report, *worker, context);
        report.fail();
    }
    report_access(*worker, static_cast<const std::byte*>(info->si_addr), context);
}

// Reports what the interrupted OS thread is doing, or that it has taken too long.
void handle_alarm(int, siginfo_t*, void* context) {
    const int seconds = int(now_s() - start_s);
    if (const Worker* worker = Worker::current()) {
        Report report = worker->fault(seconds < time_limit_s ? PROGRESS : "time limit");
        describe_code(report, *worker, context);
        if (seconds >= time_limit_s) {
            report.add(": still running after %d s", time_limit_s);
            worker->describe_progress(report);
            report.fail();
        }
        report.add(" after %d s; the limit is %d s\n", seconds, time_limit_s).print();
    }
    alarm(std::clamp(time_limit_s - seconds, 1, PROGRESS_INTERVAL_S));
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

void describe_calls(Report& report, std::initializer_list<uintptr_t> return_addresses) {
    report.add(" <code");
    for (uintptr_t address : return_addresses) add_code(report, address - 1);  // in the call
    report.add(">");
}

void install_traps(int limit_s) {
    time_limit_s = limit_s;
    start_s = now_s();
    struct sigaction action = {};
    action.sa_sigaction = handle_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE}) sigaction(signal, &action, nullptr);
    action.sa_sigaction = handle_alarm;
    action.sa_flags |= SA_RESTART;
    sigaction(SIGALRM, &action, nullptr);

    sigset_t alarm_only;
    sigemptyset(&alarm_only);
    sigaddset(&alarm_only, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &alarm_only, nullptr);
    alarm(std::min(time_limit_s, FIRST_PROGRESS_S));
}

}  // namespace simt

// Hooks that only the sanitizers call. Their report has the line; this adds the place in the grid.
extern "C" void __asan_on_error() {
    if (const simt::Worker* worker = simt::Worker::current())
        worker->fault("sanitizer error").add("\n").print();
}
extern "C" void __ubsan_on_report() { __asan_on_error(); }

// Leaks do not matter in a program that runs once; a fake stack for each fiber costs too much.
extern "C" const char* __asan_default_options() {
    return "detect_leaks=0:detect_stack_use_after_return=0";
}
