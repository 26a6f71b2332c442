// What a forward step includes that takes lengths and windows, for the host compiler: the twin of
// common/runtime/device/attention_lengths.cuh. attention.cuh says what the runtime is.
#pragma once
// clang-format off: lengths.h needs the Element of elements.cuh
#include "elements.cuh"
#include "../lengths.h"
// clang-format on
#include "step.h"

#define SIMT_STEP  // for the attention.cuh that other headers include

extern "C" LaunchDescriptor launch_descriptor;  // the step defines it

const simt::StepInterface simt_step = simt::interface_of<LengthsParams>(launch_descriptor);
