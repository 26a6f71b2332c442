// What every step of the backward ladder includes, for the host compiler: the twin of
// common/runtime/device/backward.cuh. attention.cuh says what the runtime is.
#pragma once
// clang-format off: backward.h needs the Element of elements.cuh
#include "elements.cuh"
#include "../backward.h"
// clang-format on
#include "step.h"

#define SIMT_STEP  // for the attention.cuh that other headers include

extern "C" BackwardDescriptor launch_descriptor;  // the step defines it

const simt::StepInterface simt_step = simt::interface_of<BackwardParams>(launch_descriptor);
