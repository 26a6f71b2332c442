// Vector accesses to memory, which need an aligned address, as on the device.
#pragma once
#include "access.h"
#include "cuda.h"
#include "element.h"

// Four floats in one 16-byte access; p must be 16-byte aligned.
inline float4 load_float4(const float* p, simt::Site site = simt::Site::here()) {
    simt::vector_access(p, 16, "load_float4", site);
    return *reinterpret_cast<const float4*>(p);
}

inline void store_float4(float* p, float4 x, simt::Site site = simt::Site::here()) {
    simt::vector_access(p, 16, "store_float4", site);
    simt::note_write(p, 16);
    *reinterpret_cast<float4*>(p) = x;
}

// Four floats, rounded, in one 8-byte access; p must be 8-byte aligned.
template <typename T>
void store_float4(T* p, float4 x, simt::Site site = simt::Site::here()) {
    const T elements[4] = {from_float<T>(x.x), from_float<T>(x.y), from_float<T>(x.z),
                           from_float<T>(x.w)};
    simt::vector_access(p, 8, "store_float4", site);
    simt::note_write(p, 8);
    memcpy(p, elements, sizeof(elements));
}

// VEC elements in one 16-byte access, converted to or from float; p must be 16-byte aligned.
constexpr int VEC = 16 / sizeof(Element);

inline void load_vector(float (&x)[VEC], const Element* p, simt::Site site = simt::Site::here()) {
    Element elements[VEC];
    simt::vector_access(p, 16, "load_vector", site);
    memcpy(elements, p, sizeof(elements));
    for (int i = 0; i < VEC; ++i) x[i] = to_float(elements[i]);
}

inline void store_vector(Element* p, const float (&x)[VEC], simt::Site site = simt::Site::here()) {
    Element elements[VEC];
    for (int i = 0; i < VEC; ++i) elements[i] = from_float<Element>(x[i]);
    simt::vector_access(p, 16, "store_vector", site);
    simt::note_write(p, 16);
    memcpy(p, elements, sizeof(elements));
}
