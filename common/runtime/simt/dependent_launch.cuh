// Programmatic dependent launch, for the host compiler: the twin of
// common/runtime/device/dependent_launch.cuh. Kernels run one after another all the same: accesses
// that come too early are found by global_races.h, and blocks that never wait are reported.
#pragma once
#include "attention.cuh"

extern "C" __constant__ int32_t kernels_start_early;  // the step defines it, as 0 or 1

// In one of a check's two runs it returns when no other thread of the block can go on.
void griddepcontrol_wait(simt::Site site = simt::Site::here());

// Allows what the runtime does not do.
inline void griddepcontrol_launch_dependents() {}
