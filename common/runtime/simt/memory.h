// Memory between guard pages: an access past either end of a buffer traps, and the address tells
// which buffer it was.
#pragma once
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "report.h"
#include "sanitizer.h"

#if !defined(MAP_ANONYMOUS)
#define MAP_ANONYMOUS MAP_ANON  // macOS
#endif

namespace simt {

constexpr int POISON = 0xFF;  // bytes of 0xFF are NaN in fp32, bf16 and fp16 alike
// And 0x7F00 to 0x7F7F, whose upper byte this is, 1.7e38 to 3.4e38 in the former two: fmaxf passes over NaN.
constexpr int LARGE = 0x7F;
constexpr size_t MIN_GUARD_BYTES = size_t{1} << 24;  // address space only

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
    GuardedPages(size_t bytes, size_t guard, int protection = PROT_READ | PROT_WRITE)
        : size(round_up(bytes, page_bytes())), guard(guard) {
        void* mapped =
            mmap(nullptr, size + 2 * guard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped == MAP_FAILED)
            Report().add("out of memory: no room for %zu bytes", bytes).fail();
        base = static_cast<std::byte*>(mapped) + guard;
        if (protection != PROT_NONE) allow(base, end(), protection);
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

    void allow(std::byte* first_page, std::byte* last_page_end, int protection) {
        const size_t bytes = last_page_end - first_page;
        if (mprotect(first_page, bytes, protection))
            Report().add("out of memory: no room for %zu bytes", bytes).fail();
        sanitizer_forget(first_page, bytes);
    }

  private:
    std::byte* base;
    size_t size, guard;
};

enum class Flush { END, START };  // which end of a buffer touches a guard page

// A part of a buffer that holds data.
struct Segment {
    int64_t offset, bytes;
};

// A poisoned buffer. Only the pages of its segments are accessible, so that a tensor whose rows lie
// gigabytes apart takes the memory of its rows, and an access between them traps. A segment rarely
// fills whole pages: the slack that touches no inaccessible page is poisoned too, so reads there
// give NaN and damaged_slack() detects writes.
class Buffer {
  public:
    // One segment or more, in ascending order, the first at offset 0; gaps are larger than a page.
    // The buffer's address is `misalignment` modulo `alignment`, a power of two; that may take up
    // to alignment - 1 bytes of slack at the flush end too.
    Buffer(const char* name, std::vector<Segment> of, size_t alignment, size_t misalignment,
           Flush flush)
        : name(name),
          bytes(of.back().offset + of.back().bytes),
          segments(std::move(of)),
          pages(bytes + alignment, guard_bytes(bytes), PROT_NONE) {
        if (flush == Flush::START) {
            data = pages.begin() + misalignment;
        } else {
            std::byte* highest = pages.end() - bytes;
            const size_t excess = reinterpret_cast<uintptr_t>(highest) - misalignment;
            data = highest - excess % alignment;
        }
        allow(PROT_READ | PROT_WRITE);
        poison();
    }

    void poison() {
        for (const Segment& segment : segments) {
            std::byte* from = first_page(segment);
            memset(from, POISON, last_page_end(segment) - from);
        }
    }
    // Over poison, large numbers, of which neighbors differ: a field that nobody has written would
    // otherwise equal another one. Around the segments it stays as it is.
    void fill_with_large() {
        for (const Segment& segment : segments)
            for (int64_t word = 0; word < segment.bytes / 4; ++word) {
                const uint32_t low = word % (LARGE + 1), high = word / (LARGE + 1) % (LARGE + 1);
                const uint32_t large = (LARGE << 8 | high) << 16 | LARGE << 8 | low;
                memcpy(begin(segment) + 4 * word, &large, sizeof(large));
            }
    }
    void make_read_only() { allow(PROT_READ); }
    bool contains(const std::byte* address) const {
        for (const Segment& segment : segments)
            if (begin(segment) <= address && address < end(segment)) return true;
        return false;
    }
    bool guards(const std::byte* address) const { return pages.guards(address); }

    // Where the slack has been written to; nullptr if nowhere.
    const char* damaged_slack() const {
        for (const Segment& segment : segments) {
            if (!is_poison(first_page(segment), begin(segment)))
                return &segment == &segments.front() ? "before the start" : "between the rows";
            if (!is_poison(end(segment), last_page_end(segment)))
                return &segment == &segments.back() ? "past the end" : "between the rows";
        }
        return nullptr;
    }

    // Describes an address within the buffer or its guard pages.
    void describe(Report& report, const std::byte* address) const {
        const ptrdiff_t offset = address - data;
        if (offset < 0) {
            report.add("%td bytes before the start of %s (%zu bytes)", -offset, name, bytes);
        } else if (contains(address)) {
            report.add("at byte %td of %s (%zu bytes)", offset, name, bytes);
        } else if (offset < ptrdiff_t(bytes)) {
            report.add("between the rows of %s (%zu bytes), at byte %td", name, bytes, offset);
        } else {
            report.add("past the end of %s (%zu bytes), at byte %td", name, bytes, offset);
        }
    }

    const char* const name;
    const size_t bytes;  // from the first segment's start to the last one's end
    const std::vector<Segment> segments;
    std::byte* data;

    std::byte* begin(const Segment& segment) const { return data + segment.offset; }
    std::byte* end(const Segment& segment) const { return begin(segment) + segment.bytes; }

  private:
    // Of a segment.
    std::byte* first_page(const Segment& segment) const {
        return begin(segment) - reinterpret_cast<uintptr_t>(begin(segment)) % page_bytes();
    }
    std::byte* last_page_end(const Segment& segment) const {
        const auto address = reinterpret_cast<uintptr_t>(end(segment));
        return end(segment) + (round_up(address, page_bytes()) - address);
    }

    // As much as the buffer: where an offset has the wrong sign, the report still names the buffer.
    static size_t guard_bytes(size_t bytes) {
        return round_up(bytes < MIN_GUARD_BYTES ? MIN_GUARD_BYTES : bytes, page_bytes());
    }

    void allow(int protection) {
        for (const Segment& segment : segments)
            pages.allow(first_page(segment), last_page_end(segment), protection);
    }

    static bool is_poison(const std::byte* from, const std::byte* to) {
        for (; from < to; ++from) {
            if (*from != std::byte{POISON}) return false;
        }
        return true;
    }

    GuardedPages pages;
};

}  // namespace simt
