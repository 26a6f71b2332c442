// Programmatic dependent launch (sm_90). If kernels_start_early is 1, each kernel of the step but the
// first may start when all blocks of the kernel in front have executed
// griddepcontrol_launch_dependents or have ended. Until griddepcontrol_wait it may read the step's
// inputs and nothing else in global memory; each of its blocks must execute that, or the kernel behind
// it would find what the one in front of it has not written yet. The first kernel starts when the call
// before has ended.
// common/runtime/simt/dependent_launch.cuh is the twin for the host compiler.
#pragma once
#include "attention.cuh"

extern "C" __constant__ int32_t kernels_start_early;  // the step defines it, as 0 or 1

// Waits until the kernels in front have ended, and what they have written is visible: to this thread,
// and after a barrier to the other threads of its block. Returns at once where the kernel has not
// started early.
__device__ inline void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// This block no longer holds up the start of the kernel behind. What it writes, before or after, is
// visible there after griddepcontrol_wait.
__device__ inline void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
