// A place in the source.
#pragma once
#include <string.h>

namespace simt {

// File and line. As a default argument, `Site site = Site::here()` is the caller's.
struct Site {
    const char* file = "";
    int line = 0;

    static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
    const char* file_name() const {
        const char* slash = strrchr(file, '/');
        return slash ? slash + 1 : file;
    }
    bool operator==(const Site& other) const {
        return line == other.line && (file == other.file || strcmp(file, other.file) == 0);
    }
};

}  // namespace simt
