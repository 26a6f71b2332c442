// What __launch_bounds__ says of a kernel: a launch with more threads fails on a GPU, and here.
#pragma once

namespace simt {

// One for each kernel that has bounds, known by the section that the kernel lies in.
class LaunchBounds {
  public:
    LaunchBounds(const char* section, const char* section_end, int max_threads, int = 0)
        : max_threads(max_threads), section(section), section_end(section_end), next(latest) {
        latest = this;
    }

    // nullptr for a kernel without bounds.
    static const LaunchBounds* of(const void* kernel) {
        const auto* address = static_cast<const char*>(kernel);
        const LaunchBounds* bounds = latest;
        while (bounds && !(bounds->section <= address && address < bounds->section_end))
            bounds = bounds->next;
        return bounds;
    }

    const int max_threads;

  private:
    const char *section, *section_end;
    const LaunchBounds* next;
    static inline constinit const LaunchBounds* latest = nullptr;
};

}  // namespace simt

// Stands between a kernel's `void` and its name, which the macro cannot see: it turns what precedes
// into the declaration of a function that nobody defines, and starts the kernel's again in a
// section of its own. The linker defines __start_ and __stop_ of a section.
#if defined(__ELF__)
#define __launch_bounds__(...) SIMT_LAUNCH_BOUNDS_AT(__LINE__, __VA_ARGS__)
#define SIMT_LAUNCH_BOUNDS_AT(line, ...) SIMT_LAUNCH_BOUNDS(line, __VA_ARGS__)
#define SIMT_LAUNCH_BOUNDS(line, ...)                                                \
    simt_undefined_##line();                                                         \
    extern "C" const char __start_simt_kernel_##line[], __stop_simt_kernel_##line[]; \
    static const simt::LaunchBounds simt_launch_bounds_##line(                       \
        __start_simt_kernel_##line, __stop_simt_kernel_##line, __VA_ARGS__);         \
    extern "C" __attribute__((section("simt_kernel_" #line))) void
#else
#define __launch_bounds__(...)
#endif
