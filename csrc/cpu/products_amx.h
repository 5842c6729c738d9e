// The two matrix products of a step in bfloat16 on AMX tiles. Queries are the columns of the accumulators, as in
// products_fma.h. Tile registers: 0-3 accumulate a 32 x 32 block, 4-5 hold keys (columns of V in the second product),
// 6-7 hold queries in pairs, as AMX needs them: [pair][query][2].
#pragma once

#include <immintrin.h>

#include "rows.h"
#include "simd.h"

namespace flash::cpu::FLASH_CPU_NAMESPACE {

constexpr int kTileRows = 16;             // rows of a tile register, each of 64 bytes
constexpr int kAmxBlock = 2 * kTileRows;  // both products work in blocks of 32 x 32 x 32
constexpr int kAmxPanel = kAmxBlock;      // queries

// Sets the shapes of the tile registers. Its destructor restores the caller's.
class TileConfig {
public:
    // Every tile has 16 rows. Those of the tiles 1 to 3 have 64 bytes, the others `columns` columns of 4 bytes.
    explicit TileConfig(int columns = kTileRows) {
        _tile_storeconfig(&before_);
        alignas(64) Config config{};
        config.palette = 1;
        for (int i = 0; i < 8; ++i) {
            config.row_bytes[i] = i == 0 || i >= 4 ? uint16_t(4 * columns) : 64;
            config.rows[i] = kTileRows;
        }
        __asm__ volatile("" ::"r"(&config) : "memory");  // GCC's intrinsic declares that it reads 8 of the 64 bytes
        _tile_loadconfig(&config);
    }
    ~TileConfig() {
        if (before_.palette == 0)
            _tile_release();
        else
            _tile_loadconfig(&before_);
    }
    TileConfig(const TileConfig &) = delete;
    TileConfig &operator=(const TileConfig &) = delete;

private:
    struct alignas(64) Config {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    };
    Config before_;
};

// GCC's tile intrinsics do not declare that they access memory. The compiler must not move loads and stores across
// them.
FLASH_INLINE void compiler_barrier() {
    __asm__ volatile("" ::: "memory");
}

template <int kUsedVecs>
FLASH_INLINE void multiply_tiles() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (kUsedVecs > 1) {
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
}

// c[i][column] (+)= sum over n < steps of a[i][n] * b[n][column] for 32 rows i and 16 * kUsedVecs columns; b in pairs
// of n. steps: a multiple of 32.
template <int kUsedVecs, bool kAdd>
FLASH_INLINE void multiply_block(const BFloat16 *a, int64_t a_stride, const uint32_t *b /* [steps / 2][b_stride] */,
                                 int64_t b_stride, int steps, float *c, int64_t c_stride) {
    float *c_low = c + kTileRows * c_stride;
    compiler_barrier();
    if constexpr (kAdd) {
        _tile_loadd(0, c, c_stride * 4);
        _tile_loadd(2, c_low, c_stride * 4);
        if constexpr (kUsedVecs > 1) {
            _tile_loadd(1, c + kTileRows, c_stride * 4);
            _tile_loadd(3, c_low + kTileRows, c_stride * 4);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int n = 0; n < steps; n += kAmxBlock) {
        _tile_loadd(4, a + n, a_stride * 2);
        _tile_loadd(5, a + kTileRows * a_stride + n, a_stride * 2);
        _tile_loadd(6, b + n / 2 * b_stride, b_stride * 4);
        if constexpr (kUsedVecs > 1) _tile_loadd(7, b + n / 2 * b_stride + kTileRows, b_stride * 4);
        multiply_tiles<kUsedVecs>();
    }
    _tile_stored(0, c, c_stride * 4);
    _tile_stored(2, c_low, c_stride * 4);
    if constexpr (kUsedVecs > 1) {
        _tile_stored(1, c + kTileRows, c_stride * 4);
        _tile_stored(3, c_low + kTileRows, c_stride * 4);
    }
    compiler_barrier();
}

// o[column][query] += sum over keys of v[column][key] * p[key][query] for 32 columns with plain arithmetic. For steps
// that have unseen keys and a V with an infinity or a NaN: a key whose p is 0 adds nothing.
inline void output_block_skip_zeros(const BFloat16 *v, int stride, const uint32_t *p, int keys, float *o) {
    for (int c = 0; c < kAmxBlock; ++c) {
        for (int n = 0; n < keys; ++n) {
            float v_n;
            convert_row(v + c * stride + n, &v_n, 1);
            for (int i = 0; i < kAmxPanel; ++i) {
                const uint32_t pair = p[n / 2 * kAmxPanel + i];
                const uint32_t bits = n % 2 == 0 ? pair << 16 : pair & 0xffff0000u;
                float p_n;
                std::memcpy(&p_n, &bits, 4);
                if (p_n != 0) o[c * kAmxPanel + i] += v_n * p_n;
            }
        }
    }
}

// Transposes a 16 x 16 square of 32-bit numbers.
FLASH_INLINE void transpose16(__m512i *x) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {  // x[i + j]: column 4 * lane + j of rows i .. i + 3
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    for (int j = 0; j < 4; ++j) {
        const __m512i a = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x88);       // rows 0-7, lanes 0 and 2
        const __m512i b = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xdd);       // rows 0-7, lanes 1 and 3
        const __m512i c = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x88);  // rows 8-15
        const __m512i d = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xdd);
        y[j] = _mm512_shuffle_i32x4(a, c, 0x88);
        y[4 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
        y[8 + j] = _mm512_shuffle_i32x4(a, c, 0xdd);
        y[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
    for (int i = 0; i < 16; ++i) x[i] = y[i];
}

// columns[column][key] = rows[key][c + column] for 16 columns and 32 keys; 0 for columns from `width` on (at most 16).
// Returns true if one of the numbers is infinite or NaN.
FLASH_INLINE bool transpose_values(const BFloat16 *const *rows, int c, int width, BFloat16 *columns, int stride) {
    const __mmask16 mask = __mmask16((1u << width) - 1);
    __m512i x[16];
    __mmask32 special = 0;
    for (int i = 0; i < 16; ++i) {
        const __m256i even = _mm256_maskz_loadu_epi16(mask, rows[2 * i] + c);
        const __m256i odd = _mm256_maskz_loadu_epi16(mask, rows[2 * i + 1] + c);
        x[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
        const __m512i exponent = _mm512_set1_epi16(0x7f80);
        special |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(x[i], exponent), exponent);
    }
    transpose16(x);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(columns + i * stride, x[i]);
    return special != 0;
}

// Minimax polynomial for 2^r, relative error 3e-6; its results are rounded to 8 bits.
constexpr float kExp2BFloat16[] = {9.5701018633e-3f, 5.59178603406e-2f, 0.240247448315f, 0.693121814743f,
                                   0.999999261442f};

// Rounds 16 numbers of two rows to the nearest bfloat16. Returns pairs with `even` in their lower halves.
FLASH_INLINE __m512i round_to_pairs(Vec<float> even, Vec<float> odd) {
    const __m512i half = _mm512_set1_epi32(0x8000), high = _mm512_set1_epi32(int(0xffff0000u));
    const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
    const __m512i top = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(odd), half), high);
    return _mm512_or_si512(low, top);
}

// Stores the two rows of 16 such pairs.
FLASH_INLINE void store_rows(__m512i pairs, BFloat16 *even, BFloat16 *odd) {
    _mm256_store_si256(reinterpret_cast<__m256i *>(even), _mm512_cvtepi32_epi16(pairs));
    _mm256_store_si256(reinterpret_cast<__m256i *>(odd), _mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
}

// pairs[column] = (rows[column], rows[d + column]), for d a multiple of 16.
FLASH_INLINE void pair_rows(const BFloat16 *rows, int d, uint32_t *pairs) {
    for (int c = 0; c < d; c += 16) {
        const __m256i even = _mm256_load_si256(reinterpret_cast<const __m256i *>(rows + c));
        const __m256i odd = _mm256_load_si256(reinterpret_cast<const __m256i *>(rows + d + c));
        _mm512_store_si512(
            pairs + c, _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16)));
    }
}

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
