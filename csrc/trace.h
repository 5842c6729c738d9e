// FLASH_ATTN_MINI_TRACE=1 prints each link of the call chain on stderr; flash_attn_mini/tracing.py prints the same
// format. No torch here, so that kernels' launch code can trace too.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace flash {

inline bool trace_enabled() {
    const char *value = std::getenv("FLASH_ATTN_MINI_TRACE");
    return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

// printf-like: trace("run_flash_fwd", "grid=%d", grid). Called behind `if (trace_enabled())`.
inline void trace(const char *link, const char *format, ...) {
    char fields[512];
    std::va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(fields, sizeof(fields), format, arguments);
    va_end(arguments);
    std::fprintf(stderr, "[flash_attn_mini] %-26s %s\n", link, fields);
    std::fflush(stderr);
}

inline const char *name_of(bool value) {
    return value ? "true" : "false";
}

}  // namespace flash
