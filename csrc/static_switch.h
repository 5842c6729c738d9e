// Dtype, head dim and kind of call become template arguments here, and only run_mha.cpp does it: FP16_SWITCH,
// HEADDIM_SWITCH and KIND_SWITCH each call a lambda in whose body the value is a constant.
#pragma once

#include "flash.h"
#include "kind.h"

namespace flash {

// What this build holds; setup.py passes FLASH_HDIMS and FLASH_DTYPES as comma-separated lists.
#ifdef FLASH_WITH_CUDA
inline constexpr int kBuiltHeadDims[] = {FLASH_HDIMS};
inline constexpr DType kBuiltDTypes[] = {FLASH_DTYPES};
#else
inline constexpr int kBuiltHeadDims[] = {0};
inline constexpr DType kBuiltDTypes[] = {DType::float64};
#endif

constexpr bool is_built(int headdim) {
    for (int built : kBuiltHeadDims) {
        if (built == headdim) {
            return true;
        }
    }
    return false;
}

constexpr bool is_built(DType dtype) {
    for (DType built : kBuiltDTypes) {
        if (built == dtype) {
            return true;
        }
    }
    return false;
}

// The smallest built head dim that holds d, 0 when there is none.
constexpr int built_headdim_for(int d) {
    int best = 0;
    for (int built : kBuiltHeadDims) {
        if (built >= d && (best == 0 || built < best)) {
            best = built;
        }
    }
    return best;
}

}  // namespace flash

#define KIND_CASE(KIND, NAME, ...)                                              \
    if ((KIND) == ::flash::Kind::NAME) {                                  \
        constexpr static ::flash::Kind kKind = ::flash::Kind::NAME; \
        return __VA_ARGS__();                                                   \
    }

// KIND_SWITCH(kind, [&] { f<kKind>(); }): the kind of call (sm80/kind.h).
#define KIND_SWITCH(KIND, ...)                \
    [&] {                                     \
        KIND_CASE(KIND, full, __VA_ARGS__)    \
        KIND_CASE(KIND, local, __VA_ARGS__)   \
        KIND_CASE(KIND, varlen, __VA_ARGS__)  \
        KIND_CASE(KIND, general, __VA_ARGS__) \
        KIND_CASE(KIND, paged, __VA_ARGS__)   \
    }()

// FP16_SWITCH(dtype, [&] { f<kDType>(); }): float16 or bfloat16, whichever of the two is built.
#define FP16_SWITCH(DTYPE, ...)                                                    \
    [&] {                                                                          \
        if constexpr (::flash::is_built(::flash::DType::float16)) {                \
            if ((DTYPE) == ::flash::DType::float16) {                              \
                constexpr static ::flash::DType kDType = ::flash::DType::float16;  \
                return __VA_ARGS__();                                              \
            }                                                                      \
        }                                                                          \
        if constexpr (::flash::is_built(::flash::DType::bfloat16)) {               \
            if ((DTYPE) == ::flash::DType::bfloat16) {                             \
                constexpr static ::flash::DType kDType = ::flash::DType::bfloat16; \
                return __VA_ARGS__();                                              \
            }                                                                      \
        }                                                                          \
    }()

#define HEADDIM_CASE(HEADDIM, SIZE, ...)          \
    if constexpr (::flash::is_built(SIZE)) {      \
        if ((HEADDIM) <= SIZE) {                  \
            constexpr static int kHeadDim = SIZE; \
            return __VA_ARGS__();                 \
        }                                         \
    }

// HEADDIM_SWITCH(d, [&] { f<kHeadDim>(); }): the smallest built kernel head dim that holds d.
#define HEADDIM_SWITCH(HEADDIM, ...)            \
    [&] {                                       \
        HEADDIM_CASE(HEADDIM, 32, __VA_ARGS__)  \
        HEADDIM_CASE(HEADDIM, 64, __VA_ARGS__)  \
        HEADDIM_CASE(HEADDIM, 96, __VA_ARGS__)  \
        HEADDIM_CASE(HEADDIM, 128, __VA_ARGS__) \
        HEADDIM_CASE(HEADDIM, 192, __VA_ARGS__) \
        HEADDIM_CASE(HEADDIM, 256, __VA_ARGS__) \
    }()
