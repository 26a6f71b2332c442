// What a forward step includes whose blocks find their work tiles by divisions, for the host compiler: the
// twin of common/runtime/device/attention_divisors.cuh. attention.cuh says what the runtime is.
#pragma once
// clang-format off: divisors.h needs the Element of elements.cuh
#include "elements.cuh"
#include "../divisors.h"
// clang-format on
#include "step.h"

#define SIMT_STEP  // for the attention.cuh that other headers include

extern "C" LaunchDescriptor launch_descriptor;  // the step defines it

const simt::StepInterface simt_step = simt::interface_of<DivisorsParams>(launch_descriptor);
