// Tickets: blocks that take their next work from a counter in global memory, whoever comes first.
// common/runtime/simt/ticket.cuh is the twin for the host compiler.
#pragma once
#include "attention.cuh"

// The counter's value, which then is one more: of all calls in a launch, by whatever threads and
// blocks, each gets another. The counter is in a workspace, where a kernel in front must have set it
// to 0. A ticket orders no other access to memory.
__device__ inline int take_ticket(int* counter) {
    int ticket;
    asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;"
                 : "=r"(ticket)
                 : "l"(counter)
                 : "memory");
    return ticket;
}
