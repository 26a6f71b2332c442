// Shared memory as the async proxy sees it: TMA stores and wgmma. What ordinary instructions write
// is seen there only after a fence_proxy_async() of the thread that wrote it.
#pragma once
#include <stdint.h>

#include <vector>

#include "memory.h"
#include "site.h"

namespace simt {

class AsyncView {
  public:
    explicit AsyncView(const Buffer& smem)
        : smem(smem),
          writers((smem.bytes + WORD_BYTES - 1) / WORD_BYTES),
          view(writers.size() * WORD_BYTES) {}

    void begin_block() {
        for (std::byte& byte : view) byte = std::byte{POISON};
        for (int16_t& writer : writers) writer = NOBODY;
    }

    // A thread writes bytes of shared memory by an ordinary instruction.
    void note_write(int thread, size_t offset, size_t bytes) { set_writer(thread, offset, bytes); }

    // The async proxy has written these bytes.
    void update(size_t offset, size_t bytes) {
        memcpy(view.data() + offset, smem.data + offset, bytes);
        set_writer(NOBODY, offset, bytes);
    }

    // The thread's fence: shows what it has written. Who wrote a word is known of wrappers only, so
    // that nobody's words may be its own.
    void publish(int thread) {
        for (size_t word = 0; word < writers.size(); ++word) {
            if (writers[word] != NOBODY && writers[word] != thread) continue;
            memcpy(view.data() + word * WORD_BYTES, smem.data + word * WORD_BYTES, WORD_BYTES);
            writers[word] = NOBODY;
        }
    }

    // The first of these bytes that shared memory has and the view does not; `end` without one.
    size_t first_unpublished(size_t begin, size_t end) const {
        if (memcmp(view.data() + begin, smem.data + begin, end - begin) == 0) return end;
        while (view[begin] == smem.data[begin]) ++begin;
        return begin;
    }

    // The thread that has written a byte and not fenced since; NOBODY where that is not known.
    static constexpr int16_t NOBODY = -1;
    int writer(size_t offset) const { return writers[offset / WORD_BYTES]; }

    const std::byte* data() const { return view.data(); }

  private:
    static constexpr size_t WORD_BYTES = 4;

    void set_writer(int thread, size_t offset, size_t bytes) {
        for (size_t word = offset / WORD_BYTES; word * WORD_BYTES < offset + bytes; ++word)
            writers[word] = thread;
    }

    const Buffer& smem;
    std::vector<int16_t> writers;  // of each word
    std::vector<std::byte> view;
};

// Copies bytes of shared memory as the async proxy sees them, which must be as they are.
void read_async(const std::byte* address, size_t bytes, void* to, const char* operation, Site site);

}  // namespace simt
