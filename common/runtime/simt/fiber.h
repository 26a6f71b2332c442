// A fiber: a stack and the saved registers of a suspended function. A kernel's threads are fibers.
// Written by hand because ucontext's swapcontext makes a system call for the signal mask at every
// switch.
#pragma once
#include <cstddef>

namespace simt {

// Never moves to another OS thread, so thread-local addresses that the compiler keeps in registers
// across a switch stay valid.
class Fiber {
  public:
    // For the code already running on the OS thread's own stack, so that it can be suspended.
    Fiber() = default;

    // Will run entry(), which must not return, on the stack [stack, stack + bytes).
    Fiber(std::byte* stack, size_t bytes, void (*entry)());

    // Suspends `from`, which must be the running fiber, and resumes or starts `to`.
    static void switch_to(Fiber& from, Fiber& to);

  private:
    static void enter();

    void* stack_pointer = nullptr;
    const void* stack = nullptr;  // null for an OS thread's own: only ASan knows it
    size_t stack_bytes = 0;
    void (*entry)() = nullptr;
};

}  // namespace simt
