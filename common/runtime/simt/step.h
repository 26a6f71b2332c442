// What the runtime must know of the step that it is linked with: attention.cuh defines it there.
#pragma once
#include <stddef.h>

namespace simt {

struct StepInterface {
    void (*call)(void (*kernel)(), const void* params);  // the step knows the parameter's type
    size_t params_bytes;
    const void* descriptor;
    size_t descriptor_bytes;
};

}  // namespace simt

extern "C" const simt::StepInterface simt_step;
