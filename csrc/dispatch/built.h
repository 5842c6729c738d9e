// The contents of this build: architectures, head dims and dtypes of the CUDA kernels. setup.py passes the lists.
#pragma once

#include <initializer_list>

#include "dispatch/kind.h"
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

// Hopper's own kernels, those of sm90/: "90a" in FLASH_ATTN_MINI_ARCHS.
#ifdef FLASH_WITH_SM90
inline constexpr bool kHasSm90 = true;
#else
inline constexpr bool kHasSm90 = false;
#endif

// Architecture "90a" does not compile the sm80 kernels of calls that have an sm90 kernel. True if another architecture
// does.
constexpr bool compiles_all_of_sm80() {
    for (int arch : kBuiltArchs) {
        if (arch != 90 || !contains(kExactArchs, 90)) {
            return true;
        }
    }
    return false;
}

// True if they are compiled for Hopper: "90" in FLASH_ATTN_MINI_ARCHS.
inline constexpr bool kHasSm80OnHopper = contains(kBuiltArchs, 90) && !contains(kExactArchs, 90);

// True if the build has a kernel for calls of `kind` at a head dim that is_built.
constexpr bool has_sm90_fwd(int headdim, Kind kind) {
    return kHasSm90 && headdim >= kMinHeadDimSm90 && kernels_of(kind).sm90_fwd;
}
constexpr bool has_sm90_bwd(int headdim, Kind kind) {
    return kHasSm90 && headdim >= kMinHeadDimSm90 && kernels_of(kind).sm90_bwd;
}
constexpr bool has_sm80_fwd(int headdim, Kind kind) {
    return kernels_of(kind).sm80_fwd && (compiles_all_of_sm80() || !has_sm90_fwd(headdim, kind));
}
constexpr bool has_sm80_bwd(int headdim, Kind kind) {
    return kernels_of(kind).sm80_bwd && (compiles_all_of_sm80() || !has_sm90_bwd(headdim, kind));
}

constexpr bool is_built(int headdim) {
    return contains(kBuiltHeadDims, headdim);
}

constexpr bool is_built(DType dtype) {
    return contains(kBuiltDTypes, dtype);
}

// The kernel of a cache of latent vectors (sm90/decode/flash_fwd_latent.h) comes with the kernels of head dim 192,
// which the same models need for their prompts.
constexpr bool has_latent_decode() {
    return kHasSm90 && is_built(kHeadDimLatent);
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
