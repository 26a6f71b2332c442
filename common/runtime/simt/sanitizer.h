// Tells AddressSanitizer about fibers; does nothing in a build without it.
#pragma once
#include <stddef.h>

#if defined(__has_feature)
#define SIMT_ADDRESS_SANITIZER __has_feature(address_sanitizer)
#elif defined(__SANITIZE_ADDRESS__)
#define SIMT_ADDRESS_SANITIZER 1
#endif

#if SIMT_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt {

// Call before switching to a fiber with that stack.
inline void sanitizer_start_switch([[maybe_unused]] const void* stack,
                                   [[maybe_unused]] size_t bytes) {
#if SIMT_ADDRESS_SANITIZER
    __sanitizer_start_switch_fiber(nullptr, stack, bytes);
#endif
}

// Call after a switch; returns the stack that was left.
inline void sanitizer_finish_switch([[maybe_unused]] const void** stack,
                                    [[maybe_unused]] size_t* bytes) {
#if SIMT_ADDRESS_SANITIZER
    __sanitizer_finish_switch_fiber(nullptr, stack, bytes);
#endif
}

// Of fresh pages: where a fiber's stack was before, its frames are still marked.
inline void sanitizer_forget([[maybe_unused]] const void* pages, [[maybe_unused]] size_t bytes) {
#if SIMT_ADDRESS_SANITIZER
    __asan_unpoison_memory_region(pages, bytes);
#endif
}

}  // namespace simt
