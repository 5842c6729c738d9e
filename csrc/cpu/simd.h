// Vector types and the few operations that the kernel needs, for the instruction set FLASH_CPU_ISA of the including
// isa_*.cpp: 0 = whatever the compiler assumes (SSE2, NEON: 16-byte vectors), 2 = AVX2 + FMA, 3 = AVX-512.
// Written with the vector extension of GCC and Clang; intrinsics only where it has no word for the operation.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if FLASH_CPU_ISA > 0
#include <immintrin.h>
#endif

#define FLASH_INLINE inline __attribute__((always_inline))

namespace flash::cpu::FLASH_CPU_NAMESPACE {

#if FLASH_CPU_ISA == 3
constexpr int kVecBytes = 64;
#elif FLASH_CPU_ISA == 2
constexpr int kVecBytes = 32;
#else
constexpr int kVecBytes = 16;
#endif

template <typename T>
struct Simd;
template <>
struct Simd<float> {
    using Int = int32_t;
    typedef float Vec __attribute__((vector_size(kVecBytes), may_alias));
    typedef int32_t IntVec __attribute__((vector_size(kVecBytes), may_alias));
};
template <>
struct Simd<double> {
    using Int = int64_t;
    typedef double Vec __attribute__((vector_size(kVecBytes), may_alias));
    typedef int64_t IntVec __attribute__((vector_size(kVecBytes), may_alias));
};
template <typename T>
using Vec = typename Simd<T>::Vec;
template <typename T>
using IntVec = typename Simd<T>::IntVec;
template <typename T>
constexpr int kLanes = kVecBytes / int(sizeof(T));

template <typename T>
FLASH_INLINE Vec<T> load(const T *p) {  // p is aligned to kVecBytes
    return *reinterpret_cast<const Vec<T> *>(__builtin_assume_aligned(p, kVecBytes));
}

template <typename T>
FLASH_INLINE void store(T *p, Vec<T> x) {  // p is aligned to kVecBytes
    *reinterpret_cast<Vec<T> *>(__builtin_assume_aligned(p, kVecBytes)) = x;
}

template <typename T>
FLASH_INLINE Vec<T> broadcast(T x) {
#if FLASH_CPU_ISA == 3
    if constexpr (sizeof(T) == 4) return _mm512_set1_ps(x);
    else return _mm512_set1_pd(x);
#elif FLASH_CPU_ISA == 2
    if constexpr (sizeof(T) == 4) return _mm256_set1_ps(x);
    else return _mm256_set1_pd(x);
#else
    return x - Vec<T>{};
#endif
}

// a * b + c
template <typename T>
FLASH_INLINE Vec<T> fma(Vec<T> a, Vec<T> b, Vec<T> c) {
#if FLASH_CPU_ISA == 3
    if constexpr (sizeof(T) == 4) return _mm512_fmadd_ps(a, b, c);
    else return _mm512_fmadd_pd(a, b, c);
#elif FLASH_CPU_ISA == 2
    if constexpr (sizeof(T) == 4) return _mm256_fmadd_ps(a, b, c);
    else return _mm256_fmadd_pd(a, b, c);
#else
    return a * b + c;
#endif
}

// The larger of a and b; b where either is NaN.
template <typename T>
FLASH_INLINE Vec<T> max(Vec<T> a, Vec<T> b) {
#if FLASH_CPU_ISA == 3
    if constexpr (sizeof(T) == 4) return _mm512_maskz_max_ps(__mmask16(-1), a, b);
    else return _mm512_maskz_max_pd(__mmask8(-1), a, b);
#elif FLASH_CPU_ISA == 2
    if constexpr (sizeof(T) == 4) return _mm256_max_ps(a, b);
    else return _mm256_max_pd(a, b);
#else
    return a > b ? a : b;
#endif
}

// 2^x for x <= 0, 0 where 2^x would be subnormal, NaN where x is NaN. x = n + r, n an integer, |r| <= 1/2: 2^r is a
// minimax polynomial (relative error 2e-9 for float, 3e-18 for double, before rounding); adding `magic` leaves n plus
// the exponent's bias in the low bits of the sum, and a shift makes 2^n of it.
template <typename T>
FLASH_INLINE Vec<T> exp2_nonpositive(Vec<T> x) {
    constexpr bool kFloat = sizeof(T) == 4;
    constexpr int kMantissa = std::numeric_limits<T>::digits - 1;
    constexpr T kBias = kFloat ? T(127) : T(1023);
    constexpr T kCoefficients[] = {
        T(4.4352827069572771511e-10), T(7.0741056135081427963e-09), T(1.0178198021671930844e-07),
        T(1.3215433089676399180e-06), T(1.5252733489988525649e-05),
        kFloat ? T(1.5345812161311629759e-04) : T(1.5403530462514432062e-04),
        kFloat ? T(1.3399931177239737967e-03) : T(1.3333558146789921722e-03),
        kFloat ? T(9.6184889563311816196e-03) : T(9.6181291075883352443e-03),
        kFloat ? T(5.5503287771053247990e-02) : T(5.5504108664819921605e-02),
        kFloat ? T(2.4022646890645520696e-01) : T(2.4022650695910156204e-01),
        kFloat ? T(6.9314720573719575134e-01) : T(6.9314718055994533046e-01),
        T(1)};
    const Vec<T> magic = broadcast<T>(T(3) * T(int64_t(1) << (kMantissa - 1)) + kBias);
    const Vec<T> t = x + magic;
    const Vec<T> r = x - (t - magic);
    constexpr int kFirst = kFloat ? 5 : 0;
    Vec<T> p = broadcast<T>(kCoefficients[kFirst]);
#pragma GCC unroll 16
    for (int i = kFirst + 1; i < 12; ++i) p = fma<T>(p, r, broadcast<T>(kCoefficients[i]));
    const Vec<T> pow2n = (Vec<T>)((IntVec<T>)t << kMantissa);
    return x < broadcast<T>(T(1) - kBias) ? Vec<T>{} : p * pow2n;
}

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
