// Error messages without iostreams: an extension that links libstdc++ statically crashes in ostream, because the locale
// belongs to the other copy of the library.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <cstdio>
#include <string>
#include <type_traits>

namespace flash {

inline std::string text_of(const char *text) {
    return text;
}
inline std::string text_of(const std::string &text) {
    return text;
}
inline std::string text_of(c10::ScalarType dtype) {
    return c10::toString(dtype);
}
inline std::string text_of(const c10::Device &device) {
    return device.str();
}

template <typename T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
std::string text_of(T number) {
    return std::to_string(number);
}

inline std::string text_of(double number) {
    char text[32];
    std::snprintf(text, sizeof(text), "%g", number);
    return text;
}

// "[2, 3, 4]" for any range, C arrays included.
template <typename Range>
std::string list_of(const Range &numbers) {
    std::string text = "[";
    for (const auto &number : numbers) {
        text += (text.size() > 1 ? ", " : "") + text_of(number);
    }
    return text + "]";
}

inline std::string text_of(c10::IntArrayRef numbers) {
    return list_of(numbers);
}

template <typename... Parts>
std::string message(const Parts &...parts) {
    return (text_of(parts) + ...);
}

}  // namespace flash

// TORCH_CHECK and the checks of other exception types; the message is built from its parts only if COND fails.
#define FLASH_CHECK(COND, ...) TORCH_CHECK(COND, ::flash::message(__VA_ARGS__))
#define FLASH_CHECK_VALUE(COND, ...) TORCH_CHECK_VALUE(COND, ::flash::message(__VA_ARGS__))
#define FLASH_CHECK_TYPE(COND, ...) TORCH_CHECK_TYPE(COND, ::flash::message(__VA_ARGS__))
#define FLASH_CHECK_NOT_IMPLEMENTED(COND, ...) TORCH_CHECK_NOT_IMPLEMENTED(COND, ::flash::message(__VA_ARGS__))
