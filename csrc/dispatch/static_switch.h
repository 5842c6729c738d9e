// FP16_SWITCH, HEADDIM_SWITCH and KIND_SWITCH turn the dtype, head dim and kind of a call into template arguments. Each
// calls a lambda in which the value is a constant. Only run_mha.cpp uses them.
#pragma once

#include <type_traits>

#include "dispatch/built.h"
#include "dispatch/kind.h"

namespace flash {

// The kind `split` is left out: its kernel has a dispatch of its own, run_mha_fwd_splitkv_dispatch.
template <typename Function>
void call_with_kind(Kind kind, const Function &function) {
    switch (kind) {
#define FLASH_KIND_CASE(NAME, ...)                                \
    case Kind::NAME:                                              \
        if constexpr (Kind::NAME != Kind::split) {                \
            function(std::integral_constant<Kind, Kind::NAME>()); \
        }                                                         \
        return;
        FLASH_KINDS(FLASH_KIND_CASE)
#undef FLASH_KIND_CASE
    }
}

}  // namespace flash

// KIND_SWITCH(kind, [&] { f<kKind>(); })
#define KIND_SWITCH(KIND, ...)                                                 \
    ::flash::call_with_kind((KIND), [&](auto kind_constant) {                  \
        constexpr static ::flash::Kind kKind = decltype(kind_constant)::value; \
        __VA_ARGS__();                                                         \
    })

#define FP16_CASE(DTYPE, NAME, ...)                                        \
    if constexpr (::flash::is_built(::flash::DType::NAME)) {               \
        if ((DTYPE) == ::flash::DType::NAME) {                             \
            constexpr static ::flash::DType kDType = ::flash::DType::NAME; \
            return __VA_ARGS__();                                          \
        }                                                                  \
    }

// FP16_SWITCH(dtype, [&] { f<kDType>(); }): float16 or bfloat16, if it is built.
#define FP16_SWITCH(DTYPE, ...)                 \
    [&] {                                       \
        FP16_CASE(DTYPE, float16, __VA_ARGS__)  \
        FP16_CASE(DTYPE, bfloat16, __VA_ARGS__) \
    }()

#define HEADDIM_CASE(HEADDIM, SIZE, ...)          \
    if constexpr (::flash::is_built(SIZE)) {      \
        if ((HEADDIM) <= SIZE) {                  \
            constexpr static int kHeadDim = SIZE; \
            return __VA_ARGS__();                 \
        }                                         \
    }

// HEADDIM_SWITCH(d, [&] { f<kHeadDim>(); }): the smallest built head dim that holds d.
#define HEADDIM_SWITCH(HEADDIM, ...)            \
    [&] {                                       \
        HEADDIM_CASE(HEADDIM, 32, __VA_ARGS__)  \
        HEADDIM_CASE(HEADDIM, 64, __VA_ARGS__)  \
        HEADDIM_CASE(HEADDIM, 96, __VA_ARGS__)  \
        HEADDIM_CASE(HEADDIM, 128, __VA_ARGS__) \
        HEADDIM_CASE(HEADDIM, 192, __VA_ARGS__) \
        HEADDIM_CASE(HEADDIM, 256, __VA_ARGS__) \
    }()
