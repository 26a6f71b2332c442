// What __launch_bounds__ and __cluster_dims__ say of a kernel: a launch with more threads, or of
// blocks that do not fill their clusters, fails on a GPU, and here.
#pragma once

namespace simt {

struct LaunchBounds {
    constexpr LaunchBounds(int max_threads, int = 0) : max_threads(max_threads) {}

    int max_threads;
};

struct ClusterDims {
    constexpr ClusterDims(int x, int y = 1, int z = 1) : x(x), y(y), z(z) {}

    int x, y, z;
};

// What a kernel's signature says, known by the section that the kernel lies in.
template <typename Said>
class SignatureOf {
  public:
    SignatureOf(const char* section, const char* section_end, Said said)
        : said(said), section(section), section_end(section_end), next(latest) {
        latest = this;
    }

    // nullptr for a kernel whose signature says nothing.
    static const Said* find(const void* kernel) {
        const auto* address = static_cast<const char*>(kernel);
        for (const SignatureOf* one = latest; one; one = one->next)
            if (one->section <= address && address < one->section_end) return &one->said;
        return nullptr;
    }

  private:
    const Said said;
    const char *section, *section_end;
    const SignatureOf* next;
    static inline constinit const SignatureOf* latest = nullptr;
};

}  // namespace simt

// Each stands between a kernel's `void` and its name, which the macro cannot see: it turns what
// precedes into the declaration of a function that nobody defines, and starts the kernel's again in
// a section of its own. The linker defines __start_ and __stop_ of a section.
//
// The section has its name from the line. A kernel with both, in either order, has them on one
// line: of two sections only the latter would have a kernel, and the linker would miss the other's
// __start_.
#if defined(__ELF__)
#define __launch_bounds__(...) SIMT_SIGNATURE_AT(__LINE__, LaunchBounds, __VA_ARGS__)
#define __cluster_dims__(...) SIMT_SIGNATURE_AT(__LINE__, ClusterDims, __VA_ARGS__)
#define SIMT_SIGNATURE_AT(line, Said, ...) SIMT_SIGNATURE(line, Said, __VA_ARGS__)
#define SIMT_SIGNATURE(line, Said, ...)                                                  \
    simt_undefined_##Said##_##line();                                                    \
    extern "C" const char __start_simt_kernel_##line[], __stop_simt_kernel_##line[];     \
    static const simt::SignatureOf<simt::Said> simt_signature_##Said##_##line(           \
        __start_simt_kernel_##line, __stop_simt_kernel_##line, simt::Said(__VA_ARGS__)); \
    extern "C" __attribute__((section("simt_kernel_" #line))) void
#else
#define __launch_bounds__(...)
#define __cluster_dims__(...) _Pragma("GCC error \"clusters need an ELF platform, e.g. Linux\"")
#endif
