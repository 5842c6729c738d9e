// Environment variables that switch something on.
#pragma once

#include <cstdlib>
#include <cstring>

namespace flash {

// True unless the variable is unset, empty or "0".
inline bool is_switched_on(const char *variable) {
    const char *value = std::getenv(variable);
    return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

}  // namespace flash
