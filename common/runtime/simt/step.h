// What the runtime must know of the step that it is linked with: attention.cuh defines it there, or
// backward.cuh.
#pragma once
#include <stddef.h>

namespace simt {

struct StepInterface {
    void (*call)(void (*kernel)(), const void* params);  // the step knows the parameter's type
    size_t params_bytes;
    const void* descriptor;
    size_t descriptor_bytes;
};

// Params is what the step's kernels take.
template <typename Params, typename Descriptor>
constexpr StepInterface interface_of(const Descriptor& descriptor) {
    return {
        .call =
            [](void (*kernel)(), const void* params) {
                reinterpret_cast<void (*)(Params)>(kernel)(*static_cast<const Params*>(params));
            },
        .params_bytes = sizeof(Params),
        .descriptor = &descriptor,
        .descriptor_bytes = sizeof(Descriptor),
    };
}

}  // namespace simt

extern "C" const simt::StepInterface simt_step;
