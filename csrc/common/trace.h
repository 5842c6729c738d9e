// FLASH_ATTN_MINI_TRACE=1 prints each link of the call chain on stderr, in the format of flash_attn_mini/tracing.py.
// No torch here: the launch code of the kernels traces too.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace flash {

// True unless the variable is unset, empty or "0".
inline bool is_switched_on(const char *variable) {
    const char *value = std::getenv(variable);
    return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

inline bool trace_enabled() {
    return is_switched_on("FLASH_ATTN_MINI_TRACE");
}

// Arguments as for printf: trace("run_flash_fwd", "grid=%d", grid). Callers test trace_enabled() first.
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
