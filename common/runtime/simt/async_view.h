// Shared memory as the async proxy (TMA stores, wgmma) sees it. Ordinary stores become visible
// there only after the thread that made them executes fence_proxy_async().
#pragma once
#include <stdint.h>

#include <algorithm>
#include <vector>

#include "memory.h"
#include "site.h"

namespace simt {

constexpr int CHUNK_BYTES = 16;  // what a swizzle moves; a row of a TMA box has whole ones

class AsyncView {
  public:
    explicit AsyncView(const Buffer& smem)
        : smem(smem),
          writers((smem.bytes + WORD_BYTES - 1) / WORD_BYTES),
          num_written(writers.size() / STRETCH + 1),
          view(writers.size() * WORD_BYTES) {}

    void begin_block() {
        std::copy_n(smem.data, smem.bytes, view.begin());  // poison of either kind
        for (int& writer : writers) writer = NOBODY;
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
                memcpy(view.data() + first * WORD_BYTES, smem.data + first * WORD_BYTES,
                       (end - first) * WORD_BYTES);
            } else {
                end = std::min(first + STRETCH, writers.size());
                publish_words(thread, first, end);
            }
        }
    }

    // Copies bytes of the view, which must be what shared memory holds: reports where they are not.
    // Most of what a wgmma does is this: it compares in place, as `bytes` often is a constant.
    void read(size_t offset, size_t bytes, void* to, const char* operation, Site site) const {
        if (memcmp(view.data() + offset, smem.data + offset, bytes) != 0)
            report_unpublished(offset, operation, site);
        memcpy(to, view.data() + offset, bytes);
    }

  private:
    static constexpr size_t WORD_BYTES = 4;
    static constexpr size_t STRETCH = 64;  // words
    static constexpr int NOBODY = -1;      // has written, or it is unknown who has

    // publish() of words in one stretch, of which some have a writer: without branches and with
    // pointers that nothing changes, so that the compiler makes vectors of it.
    void publish_words(int thread, size_t first, size_t end) {
        const auto* __restrict now = reinterpret_cast<const uint32_t*>(smem.data);
        auto* __restrict shown = reinterpret_cast<uint32_t*>(view.data());
        int* __restrict writer = writers.data();
        int others = 0;
        for (size_t word = first; word < end; ++word) {
            const bool is_other = (writer[word] != NOBODY) & (writer[word] != thread);
            const uint32_t before = shown[word], after = now[word];
            shown[word] = is_other ? before : after;
            writer[word] = is_other ? writer[word] : NOBODY;
            others += is_other;
        }
        num_written[first / STRETCH] = others;
    }

    // The view differs from shared memory there, or after it.
    [[noreturn]] void report_unpublished(size_t offset, const char* operation, Site site) const;

    void set_writer(size_t word, int thread) {
        num_written[word / STRETCH] += (thread != NOBODY) - (writers[word] != NOBODY);
        writers[word] = thread;
    }

    const Buffer& smem;
    std::vector<int> writers;      // of each word
    std::vector<int> num_written;  // of each stretch: words with a writer
    std::vector<std::byte> view;
};

// Copies bytes through the async proxy; reports what is not in shared memory, or not published.
void read_async(const std::byte* address, size_t bytes, void* to, const char* operation, Site site);

}  // namespace simt
