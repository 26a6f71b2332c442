// Memory between guard pages: an access past either end of a buffer traps, and the address tells
// which buffer it was.
#pragma once
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>

#include "report.h"
#include "sanitizer.h"

#if !defined(MAP_ANONYMOUS)
#define MAP_ANONYMOUS MAP_ANON  // macOS
#endif

namespace simt {

constexpr int POISON = 0xFF;  // bytes of 0xFF are NaN in fp32, bf16 and fp16 alike
constexpr size_t GUARD_BYTES = size_t{1} << 24;  // address space only; any page size divides it

inline size_t round_up(size_t n, size_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

inline size_t page_bytes() {
    static const size_t bytes = sysconf(_SC_PAGESIZE);
    return bytes;
}

// Fresh pages, with `guard` inaccessible bytes below and above.
class GuardedPages {
  public:
    GuardedPages(size_t bytes, size_t guard) : size(round_up(bytes, page_bytes())), guard(guard) {
        void* mapped =
            mmap(nullptr, size + 2 * guard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped == MAP_FAILED)
            Report().add("out of memory: no room for %zu bytes", bytes).fail();
        base = static_cast<std::byte*>(mapped) + guard;
        allow(PROT_READ | PROT_WRITE);
        sanitizer_forget(base, size);
    }
    ~GuardedPages() {
        if (base) munmap(base - guard, size + 2 * guard);
    }
    GuardedPages(GuardedPages&& other) : base(other.base), size(other.size), guard(other.guard) {
        other.base = nullptr;
    }
    GuardedPages& operator=(GuardedPages&&) = delete;

    std::byte* begin() const { return base; }
    std::byte* end() const { return base + size; }
    bool guards(const std::byte* address) const {
        return base - guard <= address && address < end() + guard;
    }

    void allow(int protection) {
        if (mprotect(base, size, protection))
            Report().add("out of memory: no room for %zu bytes", size).fail();
    }

  private:
    std::byte* base;
    size_t size, guard;
};

enum class Flush { END, START };  // which end of a buffer touches a guard page

// A poisoned buffer. It rarely fills whole pages: the slack at the end that touches no guard page
// is poisoned too, so reads there give NaN and damaged_slack() detects writes.
class Buffer {
  public:
    // The buffer's address is `misalignment` modulo `alignment`, a power of two; that may take up
    // to alignment - 1 bytes of slack at the flush end too.
    Buffer(const char* name, size_t bytes, size_t alignment, size_t misalignment, Flush flush)
        : name(name), bytes(bytes), pages(bytes + alignment, GUARD_BYTES) {
        if (flush == Flush::START) {
            data = pages.begin() + misalignment;
        } else {
            std::byte* highest = pages.end() - bytes;
            const size_t excess = reinterpret_cast<uintptr_t>(highest) - misalignment;
            data = highest - excess % alignment;
        }
        poison();
    }

    void poison() { memset(pages.begin(), POISON, pages.end() - pages.begin()); }
    void make_read_only() { pages.allow(PROT_READ); }
    bool contains(const std::byte* address) const {
        return data <= address && address < data + bytes;
    }
    bool guards(const std::byte* address) const { return pages.guards(address); }

    // Where the slack has been written to, "before the start" or "past the end"; nullptr if
    // nowhere.
    const char* damaged_slack() const {
        if (!is_poison(pages.begin(), data)) return "before the start";
        if (!is_poison(data + bytes, pages.end())) return "past the end";
        return nullptr;
    }

    // Describes an address within the buffer or its guard pages.
    void describe(Report& report, const std::byte* address) const {
        const ptrdiff_t offset = address - data;
        if (offset < 0) {
            report.add("%td bytes before the start of %s (%zu bytes)", -offset, name, bytes);
        } else if (contains(address)) {
            report.add("at byte %td of %s (%zu bytes)", offset, name, bytes);
        } else {
            report.add("past the end of %s (%zu bytes), at byte %td", name, bytes, offset);
        }
    }

    const char* const name;
    const size_t bytes;
    std::byte* data;

  private:
    static bool is_poison(const std::byte* from, const std::byte* to) {
        for (; from < to; ++from) {
            if (*from != std::byte{POISON}) return false;
        }
        return true;
    }

    GuardedPages pages;
};

}  // namespace simt
