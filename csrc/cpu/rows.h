// Rows of q, k, v and o: conversion between the element type of the tensors and the type of the arithmetic, and
// transposition between rows and the [column][query] panels that the products read.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace flash::cpu::FLASH_CPU_NAMESPACE {

struct Half {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};

// Element: the type in memory. Acc: the type of every product, sum and exponential.
template <typename Element>
struct AccOf {
    using type = float;
};
template <>
struct AccOf<double> {
    using type = double;
};

inline void convert_row(const BFloat16 *src, float *dst, int n) {
    for (int i = 0; i < n; ++i) {
        const uint32_t bits = uint32_t(src[i].bits) << 16;
        std::memcpy(dst + i, &bits, 4);
    }
}

// Rounds to nearest even; a NaN stays one.
inline void convert_row(const float *src, BFloat16 *dst, int n) {
    for (int i = 0; i < n; ++i) {
        uint32_t bits;
        std::memcpy(&bits, src + i, 4);
        const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        dst[i].bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
}

inline void convert_row(const Half *src, float *dst, int n) {
    int i = 0;
#if FLASH_CPU_ISA > 0
    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(src + i))));
    }
#endif
    for (; i < n; ++i) dst[i] = c10::detail::fp16_ieee_to_fp32_value(src[i].bits);
}

inline void convert_row(const float *src, Half *dst, int n) {
    int i = 0;
#if FLASH_CPU_ISA > 0
    for (; i + 8 <= n; i += 8) {
        _mm_storeu_si128(reinterpret_cast<__m128i *>(dst + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
    }
#endif
    for (; i < n; ++i) dst[i].bits = c10::detail::fp16_ieee_from_fp32_value(src[i]);
}

// A vector from any address.
template <typename T>
FLASH_INLINE Vec<T> load_bytes(const void *src) {
    Vec<T> x;
    std::memcpy(&x, src, sizeof(x));
    return x;
}

// A vector of consecutive elements, in the type of the arithmetic.
template <typename T>
FLASH_INLINE Vec<T> load_elements(const T *src) {
    return load_bytes<T>(src);
}

FLASH_INLINE Vec<float> load_elements(const BFloat16 *src) {
#if FLASH_CPU_ISA == 3
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(src)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
#elif FLASH_CPU_ISA == 2
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(src)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
#else
    alignas(kVecBytes) float x[kLanes<float>];
    convert_row(src, x, kLanes<float>);
    return load<float>(x);
#endif
}

FLASH_INLINE Vec<float> load_elements(const Half *src) {
#if FLASH_CPU_ISA == 3
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(src)));
#elif FLASH_CPU_ISA == 2
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(src)));
#else
    alignas(kVecBytes) float x[kLanes<float>];
    convert_row(src, x, kLanes<float>);
    return load<float>(x);
#endif
}

// Like load_elements, for `count` elements, fewer than a vector has; the other lanes are 0.
template <typename Element>
FLASH_NOINLINE Vec<typename AccOf<Element>::type> load_some_elements(const Element *src, int count) {
    Element some[kLanes<typename AccOf<Element>::type>] = {};
    std::memcpy(some, src, sizeof(Element) * size_t(count));
    return load_elements(some);
}

// 16-byte vectors and the transposition of a square of them: 4 x 4 floats or 2 x 2 doubles.
template <typename T>
struct Quad;
template <>
struct Quad<float> {
    static constexpr int kLanes = 4;
    typedef float Vec __attribute__((vector_size(16), may_alias));
    typedef float UnalignedVec __attribute__((vector_size(16), may_alias, aligned(4)));
};
template <>
struct Quad<double> {
    static constexpr int kLanes = 2;
    typedef double Vec __attribute__((vector_size(16), may_alias));
    typedef double UnalignedVec __attribute__((vector_size(16), may_alias, aligned(8)));
};

// __builtin_shufflevector, which GCC has from version 12 on.
#if defined(__clang__) || __GNUC__ >= 12
#define FLASH_SHUFFLE __builtin_shufflevector
#else
#define FLASH_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, decltype((a) == (b)){__VA_ARGS__})
#endif

FLASH_INLINE void transpose(Quad<float>::Vec *x) {
    const Quad<float>::Vec a = FLASH_SHUFFLE(x[0], x[1], 0, 4, 1, 5);
    const Quad<float>::Vec b = FLASH_SHUFFLE(x[0], x[1], 2, 6, 3, 7);
    const Quad<float>::Vec c = FLASH_SHUFFLE(x[2], x[3], 0, 4, 1, 5);
    const Quad<float>::Vec d = FLASH_SHUFFLE(x[2], x[3], 2, 6, 3, 7);
    x[0] = FLASH_SHUFFLE(a, c, 0, 1, 4, 5);
    x[1] = FLASH_SHUFFLE(a, c, 2, 3, 6, 7);
    x[2] = FLASH_SHUFFLE(b, d, 0, 1, 4, 5);
    x[3] = FLASH_SHUFFLE(b, d, 2, 3, 6, 7);
}

FLASH_INLINE void transpose(Quad<double>::Vec *x) {
    const Quad<double>::Vec a = FLASH_SHUFFLE(x[0], x[1], 0, 2);
    x[1] = FLASH_SHUFFLE(x[0], x[1], 1, 3);
    x[0] = a;
}

// The lanes i of a and b with i & kHalf equal to kHigh ? kHalf : 0: those of a keep their order in the lanes without
// the bit kHalf, those of b in the lanes with it.
template <int kHalf, bool kHigh, typename Vector, int... i>
FLASH_INLINE Vector exchange_lanes(Vector a, Vector b, std::integer_sequence<int, i...>) {
    constexpr int kShift = kHigh ? kHalf : 0, kCount = sizeof...(i);
    return FLASH_SHUFFLE(a, b, ((i & kHalf) == 0 ? i + kShift : kCount + i - kHalf + kShift)...);
}

// Transposes a square of vectors: exchanges the quarters off the diagonal, for halves of the square, then of its
// quarters, down to single lanes.
template <typename T, int kHalf = kLanes<T> / 2>
FLASH_INLINE void transpose_square(Vec<T> *x) {
    if constexpr (kHalf > 0) {
        constexpr std::make_integer_sequence<int, kLanes<T>> kAllLanes;
#pragma GCC unroll 16
        for (int i = 0; i < kLanes<T>; ++i) {
            if (i & kHalf) continue;
            const Vec<T> a = x[i], b = x[i + kHalf];
            x[i] = exchange_lanes<kHalf, false>(a, b, kAllLanes);
            x[i + kHalf] = exchange_lanes<kHalf, true>(a, b, kAllLanes);
        }
        transpose_square<T, kHalf / 2>(x);
    }
}

// ---- keys in the lanes ----

// Columns that a word holds: a word is a lane of a vector. Two numbers of bfloat16 travel as one word, because moving
// words takes most of the time.
template <typename Element>
constexpr int kColumnsOfWord = std::is_same_v<Element, BFloat16> ? 2 : 1;

#if FLASH_CPU_ISA == 3
// Four words from any address.
FLASH_INLINE __m128 load_128(const void *src) {
    __m128 x;
    std::memcpy(&x, src, sizeof(x));
    return x;
}
#endif

// words[i] = the word i of rows[lane] from `column` on: the transposition of a square of words.
template <typename Element>
FLASH_INLINE void load_words(const Element *const *rows, int column, Vec<typename AccOf<Element>::type> *words) {
    using Acc = typename AccOf<Element>::type;
#if FLASH_CPU_ISA == 3
    // Four words of the rows i, i + 4, i + 8 and i + 12 come together when they are loaded. That halves the shuffles.
    if constexpr (kColumnsOfWord<Element> * sizeof(Element) == 4) {
        __m512 x[16];  // x[4 * quad + i]
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 4
            for (int quad = 0; quad < 4; ++quad) {
                const int at = column + 4 * quad * kColumnsOfWord<Element>;
                __m512 y = _mm512_castps128_ps512(load_128(rows[i] + at));
                y = _mm512_insertf32x4(y, load_128(rows[i + 4] + at), 1);
                y = _mm512_insertf32x4(y, load_128(rows[i + 8] + at), 2);
                x[4 * quad + i] = _mm512_insertf32x4(y, load_128(rows[i + 12] + at), 3);
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < 16; i += 4) {
            const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(x[i], x[i + 1]));  // words 0 and 1 of two rows
            const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(x[i + 2], x[i + 3]));
            const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(x[i], x[i + 1]));
            const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(x[i + 2], x[i + 3]));
            words[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(low01, low23));
            words[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low01, low23));
            words[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high01, high23));
            words[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high01, high23));
        }
        return;
    }
#endif
#pragma GCC unroll 16
    for (int row = 0; row < kLanes<Acc>; ++row) {
        if constexpr (kColumnsOfWord<Element> == 2)
            words[row] = load_bytes<float>(rows[row] + column);
        else
            words[row] = load_elements(rows[row] + column);
    }
    transpose_square<Acc>(words);
}

// The column kPart of a word, in the type of the arithmetic.
template <typename Element, int kPart>
FLASH_INLINE Vec<typename AccOf<Element>::type> column_of(Vec<typename AccOf<Element>::type> word) {
    if constexpr (kColumnsOfWord<Element> == 1) {
        return word;
    } else {
        const auto bits = (IntVec<float>)word;
        return (Vec<float>)(kPart == 0 ? bits << 16 : bits & int32_t(0xffff0000));
    }
}

#undef FLASH_SHUFFLE

#if FLASH_CPU_ISA > 0
// panel[column][i] = rows[i][column] for 8 rows and the first d / 8 * 8 columns.
template <int kPanel>
FLASH_INLINE int eight_rows_to_panel(const float *const *rows, int d, float *panel) {
    int c = 0;
    for (; c + 8 <= d; c += 8) {
        __m256 x[8], y[8];
#pragma GCC unroll 8
        for (int r = 0; r < 8; ++r) x[r] = _mm256_loadu_ps(rows[r] + c);
#pragma GCC unroll 4
        for (int r = 0; r < 8; r += 2) {
            y[r] = _mm256_unpacklo_ps(x[r], x[r + 1]);
            y[r + 1] = _mm256_unpackhi_ps(x[r], x[r + 1]);
        }
#pragma GCC unroll 2
        for (int r = 0; r < 8; r += 4) {
            x[r] = _mm256_shuffle_ps(y[r], y[r + 2], 0x44);
            x[r + 1] = _mm256_shuffle_ps(y[r], y[r + 2], 0xee);
            x[r + 2] = _mm256_shuffle_ps(y[r + 1], y[r + 3], 0x44);
            x[r + 3] = _mm256_shuffle_ps(y[r + 1], y[r + 3], 0xee);
        }
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
            _mm256_store_ps(panel + (c + r) * kPanel, _mm256_permute2f128_ps(x[r], x[r + 4], 0x20));
            _mm256_store_ps(panel + (c + r + 4) * kPanel, _mm256_permute2f128_ps(x[r], x[r + 4], 0x31));
        }
    }
    return c;
}
#endif

// panel[column][i] = rows[i][column] for n_rows rows of d columns; the panel's other lanes become 0.
template <typename T, int kPanel>
void rows_to_panel(const T *const *rows, int n_rows, int d, T *panel) {
    constexpr int kQuad = Quad<T>::kLanes;
    if (n_rows < kPanel) std::memset(panel, 0, sizeof(T) * size_t(d) * kPanel);
    int step = kQuad;
    for (int i = 0; i < n_rows; i += step) {
        int c = 0;
        step = kQuad;
#if FLASH_CPU_ISA > 0
        if constexpr (std::is_same_v<T, float>) {
            if (i + 8 <= n_rows) {
                c = eight_rows_to_panel<kPanel>(rows + i, d, panel + i);
                step = 8;
            }
        }
#endif
        if (step == kQuad && i + kQuad <= n_rows) {
            for (; c + kQuad <= d; c += kQuad) {
                typename Quad<T>::Vec x[kQuad];
                for (int r = 0; r < kQuad; ++r) {
                    x[r] = *reinterpret_cast<const typename Quad<T>::UnalignedVec *>(rows[i + r] + c);
                }
                transpose(x);
                for (int r = 0; r < kQuad; ++r) {
                    *reinterpret_cast<typename Quad<T>::Vec *>(panel + (c + r) * kPanel + i) = x[r];
                }
            }
        }
        for (int r = i; r < i + step && r < n_rows; ++r) {
            for (int e = c; e < d; ++e) panel[e * kPanel + r] = rows[r][e];
        }
    }
}

// rows[i][column] = factor[i] * panel[column][i] for n_rows rows of d columns.
template <typename T, int kPanel>
void panel_to_rows(const T *panel, const T *factor, int n_rows, int d, T *const *rows) {
    constexpr int kQuad = Quad<T>::kLanes;
    for (int i = 0; i < n_rows; i += kQuad) {
        int c = 0;
        if (i + kQuad <= n_rows) {
            const auto factor_i = *reinterpret_cast<const typename Quad<T>::Vec *>(factor + i);
            for (; c + kQuad <= d; c += kQuad) {
                typename Quad<T>::Vec x[kQuad];
                for (int r = 0; r < kQuad; ++r) {
                    x[r] = factor_i * *reinterpret_cast<const typename Quad<T>::Vec *>(panel + (c + r) * kPanel + i);
                }
                transpose(x);
                for (int r = 0; r < kQuad; ++r) {
                    *reinterpret_cast<typename Quad<T>::UnalignedVec *>(rows[i + r] + c) = x[r];
                }
            }
        }
        for (int r = i; r < i + kQuad && r < n_rows; ++r) {
            for (int e = c; e < d; ++e) rows[r][e] = factor[r] * panel[e * kPanel + r];
        }
    }
}

// ---- the rows and keys of one group (kernels.h), and their addresses in the tensors

constexpr int round_up(int64_t x, int multiple) {
    return int((x + multiple - 1) / multiple * multiple);
}

// Allocates arrays in a thread's scratch memory. Without memory it only counts bytes.
class Scratch {
public:
    explicit Scratch(char *memory) : memory_(memory) {}

    template <typename T>
    void take(T *&ptr, int64_t count) {
        if (memory_ != nullptr) ptr = reinterpret_cast<T *>(memory_ + end_);
        end_ += (sizeof(T) * size_t(count) + 63) / 64 * 64;
    }
    size_t bytes() const { return end_; }
    bool is_counting() const { return memory_ == nullptr; }

private:
    char *const memory_;
    size_t end_ = 0;
};

// The keys that each row sees, as RowKeys says it: row i in lane i of vectors.
template <typename T>
struct KeysOfRows {
    using Int = typename Simd<T>::Int;
    Int *lo = nullptr, *hi = nullptr;
    Int *gap_lo = nullptr, *gap_hi = nullptr;  // null: no row has a gap

    void take(Scratch &scratch, const Flash_fwd_params &params, int64_t rows) {
        scratch.take(lo, rows);
        scratch.take(hi, rows);
        if (params.key_ranges.count < 2) return;
        scratch.take(gap_lo, rows);
        scratch.take(gap_hi, rows);
    }
    bool has_gaps() const { return gap_lo != nullptr; }
    void set(int64_t i, const RowKeys &keys) const {
        lo[i] = Int(keys.lo);
        hi[i] = Int(keys.hi);
        if (!has_gaps()) return;
        gap_lo[i] = Int(keys.gap_lo);
        gap_hi[i] = Int(keys.gap_hi);
    }
    bool is_seen(int64_t i, int64_t key) const {
        return key >= lo[i] && key < hi[i] && !(has_gaps() && key >= gap_lo[i] && key < gap_hi[i]);
    }
    // The rows from i on.
    KeysOfRows from(int64_t i) const {
        return has_gaps() ? KeysOfRows{lo + i, hi + i, gap_lo + i, gap_hi + i} : KeysOfRows{lo + i, hi + i};
    }
};

// Those of the rows in the lanes of a vector, from row i on.
template <typename T, bool kHasGaps>
struct KeysOfLanes {
    using Int = typename Simd<T>::Int;
    IntVec<T> lo, hi, gap_lo, gap_hi;

    FLASH_INLINE KeysOfLanes(const KeysOfRows<T> &rows, int64_t i) {
        lo = *reinterpret_cast<const IntVec<T> *>(rows.lo + i);
        hi = *reinterpret_cast<const IntVec<T> *>(rows.hi + i);
        if constexpr (kHasGaps) {
            gap_lo = *reinterpret_cast<const IntVec<T> *>(rows.gap_lo + i);
            gap_hi = *reinterpret_cast<const IntVec<T> *>(rows.gap_hi + i);
        }
    }
    FLASH_INLINE IntVec<T> see(Int key) const {
        const IntVec<T> keys = IntVec<T>{} + key;
        if constexpr (kHasGaps) return (keys >= lo) & (keys < hi) & ((keys < gap_lo) | (keys >= gap_hi));
        return (keys >= lo) & (keys < hi);
    }
};

template <typename Element>
struct Group {
    const Flash_fwd_params &params;
    int64_t bidb, bidh_k;
    Sequence seq = sequence(params, int(bidb));

    int64_t rows() const { return int64_t(seq.seqlen_q) * params.h_h_k_ratio; }
    int64_t query(int64_t row) const { return row / params.h_h_k_ratio; }
    int64_t head(int64_t row) const { return bidh_k * params.h_h_k_ratio + row % params.h_h_k_ratio; }
    // Rows without a key get output 0 and no gradient, and give none.
    RowKeys keys_seen(int64_t row) const {
        return keys_of_row(params, seq, bidb, [&] { return head(row); }, query(row));
    }

    // First element of a row of q or o, or of a key of k or v.
    Element *row_ptr(const TensorRef &t, int64_t row) const {
        return static_cast<Element *>(t.ptr) + bidb * t.batch_stride + (seq.q_begin + query(row)) * t.row_stride +
               head(row) * t.head_stride;
    }
    Element *key_ptr(const TensorRef &t, int64_t key) const {
        Element *const of_head = static_cast<Element *>(t.ptr) + bidh_k * t.head_stride;
        if (params.block_table == nullptr) {
            return of_head + seq.k_bidb * t.batch_stride + (seq.k_begin + key) * t.row_stride;
        }
        const int64_t place = seq.k_begin + key;
        const int64_t page = params.block_table[bidb * params.block_table_batch_stride + place / params.page_size];
        return of_head + page * t.batch_stride + place % params.page_size * t.row_stride;
    }
    // Index of a row in softmax_lse.
    int64_t lse_index(int64_t row) const {
        return bidb * params.lse_batch_stride + head(row) * params.lse_head_stride + seq.q_begin + query(row);
    }
};

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
