// Vector types and operations of the kernels for the instruction set FLASH_CPU_ISA, which isa_*.cpp defines: 0 =
// 16-byte vectors of the compiler's target (SSE2, NEON), 2 = AVX2 + FMA, 3 = AVX-512. Uses the vector extension of GCC
// and Clang, and intrinsics where the extension lacks the operation.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if FLASH_CPU_ISA > 0
#include <immintrin.h>
#endif

#define FLASH_INLINE inline __attribute__((always_inline))
#define FLASH_NOINLINE __attribute__((noinline))  // an inner loop gets its own register allocation

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
    if constexpr (sizeof(T) == 4)
        return _mm512_set1_ps(x);
    else
        return _mm512_set1_pd(x);
#elif FLASH_CPU_ISA == 2
    if constexpr (sizeof(T) == 4)
        return _mm256_set1_ps(x);
    else
        return _mm256_set1_pd(x);
#else
    return x - Vec<T>{};
#endif
}

// a * b + c
template <typename T>
FLASH_INLINE Vec<T> fma(Vec<T> a, Vec<T> b, Vec<T> c) {
#if FLASH_CPU_ISA == 3
    if constexpr (sizeof(T) == 4)
        return _mm512_fmadd_ps(a, b, c);
    else
        return _mm512_fmadd_pd(a, b, c);
#elif FLASH_CPU_ISA == 2
    if constexpr (sizeof(T) == 4)
        return _mm256_fmadd_ps(a, b, c);
    else
        return _mm256_fmadd_pd(a, b, c);
#else
    return a * b + c;
#endif
}

// Returns x, opaque to the compiler. So a product and a sum are not fused into one operation with one rounding.
template <typename Vector>
FLASH_INLINE Vector rounded(Vector x) {
#if FLASH_CPU_ISA == 3
    __asm__("" : "+v"(x));
#elif FLASH_CPU_ISA == 2 || defined(__SSE2__)
    __asm__("" : "+x"(x));
#elif defined(__aarch64__)
    __asm__("" : "+w"(x));
#endif
    return x;
}

// The larger of a and b; b where either is NaN.
template <typename T>
FLASH_INLINE Vec<T> max(Vec<T> a, Vec<T> b) {
#if FLASH_CPU_ISA == 3
    if constexpr (sizeof(T) == 4)
        return _mm512_maskz_max_ps(__mmask16(-1), a, b);
    else
        return _mm512_maskz_max_pd(__mmask8(-1), a, b);
#elif FLASH_CPU_ISA == 2
    if constexpr (sizeof(T) == 4)
        return _mm256_max_ps(a, b);
    else
        return _mm256_max_pd(a, b);
#else
    return a > b ? a : b;
#endif
}

// The largest exponent, which is also the bias of stored exponents.
template <typename T>
constexpr T kExponentBias = T(std::numeric_limits<T>::max_exponent - 1);

// x = n + r, n an integer, |r| <= 1/2, for x above -kExponentBias. The low bits of x + magic are n plus the exponent's
// bias; a shift turns them into 2^n.
template <typename T>
struct SplitExponent {
    Vec<T> r, pow2n;
};

template <typename T>
FLASH_INLINE SplitExponent<T> split_exponent(Vec<T> x) {
    constexpr int kMantissa = std::numeric_limits<T>::digits - 1;
    const Vec<T> magic = broadcast<T>(T(3) * T(int64_t(1) << (kMantissa - 1)) + kExponentBias<T>);
    const Vec<T> t = x + magic;
    return {x - (t - magic), (Vec<T>)((IntVec<T>)t << kMantissa)};
}

// 2^x for x <= 0; 0 where the result is below 2^-101 (double: 2^-818); NaN where x is NaN. Such a small probability
// does not change a sum with that of the largest score. But its products would be subnormal numbers, which are 100
// times as slow on some CPUs; ALiBi's slopes make many of them. coefficients: of a polynomial for 2^r, highest power
// first.
template <typename T, int kTerms>
FLASH_INLINE Vec<T> exp2_nonpositive(Vec<T> x, const T (&coefficients)[kTerms]) {
    const SplitExponent<T> split = split_exponent<T>(x);
    Vec<T> p = broadcast<T>(coefficients[0]);
#pragma GCC unroll 16
    for (int i = 1; i < kTerms; ++i) p = fma<T>(p, split.r, broadcast<T>(coefficients[i]));
    return x < broadcast<T>(T(-0.8) * kExponentBias<T>) ? Vec<T>{} : p * split.pow2n;
}

// Minimax polynomials for 2^r, with their relative error before rounding.
constexpr float kExp2Float[] = {1.5345812161311630e-4f, 1.3399931177239738e-3f, 9.6184889563311816e-3f,  // 2e-9
                                5.5503287771053248e-2f, 2.4022646890645521e-1f, 6.9314720573719576e-1f, 1.0f};
constexpr double kExp2Double[] = {4.4352827069572771511e-10, 7.0741056135081427963e-09, 1.0178198021671930844e-07,
                                  1.3215433089676399180e-06, 1.5252733489988525649e-05, 1.5403530462514432062e-04,
                                  1.3333558146789921722e-03, 9.6181291075883352443e-03, 5.5504108664819921605e-02,
                                  2.4022650695910156204e-01, 6.9314718055994533046e-01, 1.0};  // 3e-18

constexpr auto &exp2_terms(float) {
    return kExp2Float;
}
constexpr auto &exp2_terms(double) {
    return kExp2Double;
}

FLASH_INLINE Vec<float> exp2_nonpositive(Vec<float> x) {
    return exp2_nonpositive<float>(x, kExp2Float);
}
FLASH_INLINE Vec<double> exp2_nonpositive(Vec<double> x) {
    return exp2_nonpositive<double>(x, kExp2Double);
}

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
