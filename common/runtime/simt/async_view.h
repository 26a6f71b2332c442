// Shared memory as the async proxy (TMA stores, wgmma) sees it. Ordinary stores become visible
// there only after the thread that made them executes fence_proxy_async().
#pragma once
#include <stdint.h>

#include <algorithm>
#include <vector>

#include "memory.h"
#include "site.h"

namespace simt {

class AsyncView {
  public:
    explicit AsyncView(const Buffer& smem)
        : smem(smem),
          writers((smem.bytes + WORD_BYTES - 1) / WORD_BYTES),
          num_written(writers.size() / STRETCH + 1),
          view(writers.size() * WORD_BYTES) {}

    void begin_block() {
        for (std::byte& byte : view) byte = std::byte{POISON};
        for (int16_t& writer : writers) writer = NOBODY;
        for (int& number : num_written) number = 0;
    }

    // A thread writes bytes of shared memory with an ordinary store.
    void note_write(int thread, size_t offset, size_t bytes) {
        // An access that ends outside shared memory is reported later.
        for (size_t word = offset / WORD_BYTES;
             word < writers.size() && word * WORD_BYTES < offset + bytes; ++word)
            set_writer(word, thread);
    }

    // The async proxy has written these bytes.
    void update(size_t offset, size_t bytes) {
        memcpy(view.data() + offset, smem.data + offset, bytes);
        note_write(NOBODY, offset, bytes);
    }

    // The thread's fence publishes what it has written. Only wrappers record a writer, so words
    // with none may be the thread's own and are published too.
    void publish(int thread) {
        for (size_t first = 0, end; first < writers.size(); first = end) {
            end = first;
            while (end < writers.size() && num_written[end / STRETCH] == 0) end += STRETCH;
            if (end > first) {  // the common case
                end = std::min(end, writers.size());
                show(first, end);
                continue;
            }
            end = std::min(first + STRETCH, writers.size());
            for (size_t word = first; word < end; ++word) {
                if (writers[word] != NOBODY && writers[word] != thread) continue;
                show(word, word + 1);
                set_writer(word, NOBODY);
            }
        }
    }

    // The first byte in [begin, end) where the view differs from shared memory; `end` if none does.
    size_t first_unpublished(size_t begin, size_t end) const {
        if (memcmp(view.data() + begin, smem.data + begin, end - begin) == 0) return end;
        while (view[begin] == smem.data[begin]) ++begin;
        return begin;
    }

    // The thread that has written a byte and not fenced since; NOBODY if unknown.
    static constexpr int16_t NOBODY = -1;
    int writer(size_t offset) const { return writers[offset / WORD_BYTES]; }

    const std::byte* data() const { return view.data(); }

  private:
    static constexpr size_t WORD_BYTES = 4;
    static constexpr size_t STRETCH = 64;  // words

    void show(size_t first_word, size_t end_word) {
        memcpy(view.data() + first_word * WORD_BYTES, smem.data + first_word * WORD_BYTES,
               (end_word - first_word) * WORD_BYTES);
    }

    void set_writer(size_t word, int thread) {
        num_written[word / STRETCH] += (thread != NOBODY) - (writers[word] != NOBODY);
        writers[word] = thread;
    }

    const Buffer& smem;
    std::vector<int16_t> writers;  // of each word
    std::vector<int> num_written;  // of each stretch: words with a writer
    std::vector<std::byte> view;
};

// Copies bytes through the async proxy; reports where its view differs from shared memory.
void read_async(const std::byte* address, size_t bytes, void* to, const char* operation, Site site);

}  // namespace simt
