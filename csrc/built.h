// What this build contains: architectures, head dims and dtypes of the CUDA kernels. setup.py passes the lists.
#pragma once

#include <initializer_list>

#include "flash.h"

// Compute capabilities that were compiled with the suffix 'a'. Their code runs on exactly that capability.
#ifndef FLASH_ARCHS_EXACT
#define FLASH_ARCHS_EXACT
#endif

namespace flash {

#ifdef FLASH_WITH_CUDA
inline constexpr std::initializer_list<int> kBuiltArchs = {FLASH_ARCHS};  // 90 for compute capability 9.0
inline constexpr std::initializer_list<int> kExactArchs = {FLASH_ARCHS_EXACT};
inline constexpr std::initializer_list<int> kBuiltHeadDims = {FLASH_HDIMS};
inline constexpr std::initializer_list<DType> kBuiltDTypes = {FLASH_DTYPES};
#else
inline constexpr std::initializer_list<int> kBuiltArchs = {};
inline constexpr std::initializer_list<int> kExactArchs = {};
inline constexpr std::initializer_list<int> kBuiltHeadDims = {};
inline constexpr std::initializer_list<DType> kBuiltDTypes = {};
#endif

template <typename T>
constexpr bool contains(std::initializer_list<T> list, T value) {
    for (T x : list) {
        if (x == value) {
            return true;
        }
    }
    return false;
}

constexpr bool is_built(int headdim) {
    return contains(kBuiltHeadDims, headdim);
}

constexpr bool is_built(DType dtype) {
    return contains(kBuiltDTypes, dtype);
}

// True if a kernel of this build runs on compute capability major.minor. Code without a suffix runs on the same major
// version from its minor version up.
constexpr bool runs_on(int major, int minor) {
    for (int arch : kBuiltArchs) {
        const bool is_exact = contains(kExactArchs, arch);
        if (arch / 10 == major && (is_exact ? arch % 10 == minor : arch % 10 <= minor)) {
            return true;
        }
    }
    return false;
}

// The smallest built head dim that holds d; 0 if there is none.
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
