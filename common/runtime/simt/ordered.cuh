// Ordered sections, for the host compiler: the twin of common/runtime/device/ordered.cuh. What a warp
// adds to global memory in a section is added there and then; other additions have no order. A section
// begins and ends with no bulk store or reduction of the warp in flight.
#pragma once
#include "attention.cuh"

void begin_ordered(int& counter, int place, simt::Site site = simt::Site::here());

// In one of a check's two runs the block goes on only when no other one can.
void end_ordered(int& counter, int place, simt::Site site = simt::Site::here());
