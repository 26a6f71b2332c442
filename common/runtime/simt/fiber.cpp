#include "fiber.h"

#include <stdint.h>

#include "sanitizer.h"

// Pushes the registers that a callee must preserve, stores the stack pointer to *save, takes `load`
// for stack pointer, pops the registers that an earlier switch pushed there, and returns to that
// switch's caller.
extern "C" void simt_switch_stack(void** save, void* load) __asm__("simt_switch_stack");

#if defined(__x86_64__)
__asm__(R"(
    .text
    .p2align 4
simt_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    retq
)");
#elif defined(__aarch64__)
__asm__(R"(
    .text
    .p2align 4
simt_switch_stack:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp d8, d9, [sp, #80]
    stp d10, d11, [sp, #96]
    stp d12, d13, [sp, #112]
    stp d14, d15, [sp, #128]
    stp x29, x30, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp d8, d9, [sp, #80]
    ldp d10, d11, [sp, #96]
    ldp d12, d13, [sp, #112]
    ldp d14, d15, [sp, #128]
    ldp x29, x30, [sp, #144]
    add sp, sp, #160
    ret
)");
#else
#error "the SIMT runtime switches stacks on x86-64 and arm64 only"
#endif

namespace simt {

static constinit thread_local Fiber *switching_from = nullptr, *switching_to = nullptr;

Fiber::Fiber(std::byte* stack, size_t bytes, void (*entry)())
    : stack(stack), stack_bytes(bytes), entry(entry) {
    // What simt_switch_stack pops: fresh pages, so all zero but the address it returns to.
    auto* top = reinterpret_cast<uint64_t*>(stack + bytes);
#if defined(__x86_64__)
    top -= 8;  // six registers, the return address, and the one that entry will never return to
    top[6] = reinterpret_cast<uint64_t>(&enter);
#else
    top -= 20;
    top[19] = reinterpret_cast<uint64_t>(&enter);  // x30
#endif
    stack_pointer = top;
}

void Fiber::switch_to(Fiber& from, Fiber& to) {
    switching_from = &from;
    switching_to = &to;
    sanitizer_start_switch(to.stack, to.stack_bytes);
    simt_switch_stack(&from.stack_pointer, to.stack_pointer);
    // Another fiber has switched back to `from`.
    sanitizer_finish_switch(&switching_from->stack, &switching_from->stack_bytes);
}

void Fiber::enter() {
    sanitizer_finish_switch(&switching_from->stack, &switching_from->stack_bytes);
    switching_to->entry();
}

}  // namespace simt
