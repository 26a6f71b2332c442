// A fiber: a stack and the registers of a function that was suspended in the middle. A kernel's
// threads are fibers. Written by hand because ucontext's swapcontext makes a system call for the
// signal mask at every switch.
#pragma once
#include <cstddef>

namespace simt {

// Never moves to another OS thread, so that thread-local addresses which a compiler keeps across a
// switch stay right.
class Fiber {
  public:
    // For the code that runs already, on the OS thread's own stack, to be suspended in.
    Fiber() = default;

    // Will run entry(), which must not return, on the stack [stack, stack + bytes).
    Fiber(std::byte* stack, size_t bytes, void (*entry)());

    // Suspends `from`, which must be the running fiber, and resumes or starts `to`.
    static void switch_to(Fiber& from, Fiber& to);

  private:
    static void enter();

    void* stack_pointer = nullptr;
    const void* stack = nullptr;  // an OS thread's own is known to AddressSanitizer only
    size_t stack_bytes = 0;
    void (*entry)() = nullptr;
};

}  // namespace simt
