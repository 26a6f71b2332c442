// How the runtime reports what a kernel did wrong: one report on stderr, then the process exits.
#pragma once
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include <cstddef>

namespace simt {

// Mirrored by common/runtime/cpu.py.
constexpr int FAULT_EXIT_CODE = 65;                  // sanitizers exit with 1
constexpr const char* PROGRESS = "still computing";  // begins a line that is no fault

// Text of bounded length; allocates nothing, so a signal handler can write it. Its first line is a
// summary.
class Report {
  public:
    __attribute__((format(printf, 2, 3))) Report& add(const char* format, ...) {
        va_list arguments;
        va_start(arguments, format);
        const int written = vsnprintf(text + length, sizeof(text) - length, format, arguments);
        va_end(arguments);
        length += written;
        if (length >= sizeof(text)) length = sizeof(text) - 1;
        return *this;
    }

    void print() const {
        for (size_t done = 0; done < length;) {
            const ssize_t written = write(STDERR_FILENO, text + done, length - done);
            if (written <= 0) return;
            done += written;
        }
    }

    // Prints and exits the process. Of several threads that fail at once, only the first reports.
    [[noreturn]] void fail() {
        static bool reported = false;
        while (__atomic_test_and_set(&reported, __ATOMIC_RELAXED)) pause();
        add("\n");
        print();
        _exit(FAULT_EXIT_CODE);
    }

  private:
    char text[8192];
    size_t length = 0;
};

}  // namespace simt
