// Large arrays that nobody initializes: g++ calls memset for them, with the byte that nan_pattern.sh
// replaces elsewhere. Steps are linked with --wrap=memset.
#include <stdint.h>
#include <string.h>

#if defined(__linux__) && !defined(__clang__)  // as in _nan_flags() of common/runtime/cpu.py

extern "C" void* __real_memset(void* to, int byte, size_t count);

extern "C" void* __wrap_memset(void* to, int byte, size_t count) {
    constexpr int PATTERN = 0xFE;
    __real_memset(to, byte, count);
    if (byte == PATTERN)
        for (size_t i = 1; i < count; i += 2) static_cast<uint8_t*>(to)[i] = 0xFF;
    return to;
}

#endif
