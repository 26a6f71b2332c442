// Signals between blocks, for the host compiler: the twin of common/runtime/device/signal.cuh. Each
// must be taken before it is posted again, and before the launch ends.
#pragma once
#include "attention.cuh"

using Signal = uint64_t;

// In one of a check's two runs the block goes on only when no other one can.
void post_signal(Signal& signal, simt::Site site = simt::Site::here());

void take_signal(Signal& signal, simt::Site site = simt::Site::here());
