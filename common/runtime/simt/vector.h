// Vector accesses to memory, which need an aligned address, as on the device.
#pragma once
#include "access.h"
#include "cuda.h"
#include "element.h"

// Four floats in one 16-byte access; p must be 16-byte aligned.
inline float4 load_float4(const float* p, simt::Site site = simt::Site::here()) {
    return simt::vector_load<float4>(p, "load_float4", site);
}

inline void store_float4(float* p, float4 x, simt::Site site = simt::Site::here()) {
    simt::vector_store(p, x, "store_float4", site);
}

// Four floats, rounded, in one 8-byte access; p must be 8-byte aligned.
template <typename T>
void store_float4(T* p, float4 x, simt::Site site = simt::Site::here()) {
    const T elements[4] = {from_float<T>(x.x), from_float<T>(x.y), from_float<T>(x.z),
                           from_float<T>(x.w)};
    simt::vector_store(p, std::bit_cast<uint64_t>(elements), "store_float4", site);
}

// VEC elements in one 16-byte access, converted to or from float; p must be 16-byte aligned.
constexpr int VEC = 16 / sizeof(Element);

inline void load_vector(float (&x)[VEC], const Element* p, simt::Site site = simt::Site::here()) {
    const uint4 bits = simt::vector_load<uint4>(p, "load_vector", site);
    Element elements[VEC];
    memcpy(elements, &bits, sizeof(elements));
    for (int i = 0; i < VEC; ++i) x[i] = to_float(elements[i]);
}

inline void store_vector(Element* p, const float (&x)[VEC], simt::Site site = simt::Site::here()) {
    Element elements[VEC];
    for (int i = 0; i < VEC; ++i) elements[i] = from_float<Element>(x[i]);
    simt::vector_store(p, std::bit_cast<uint4>(elements), "store_vector", site);
}
