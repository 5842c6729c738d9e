// compute_attn_1rowblock for bfloat16 on AMX and blocks of up to 8 rows, as in decoding.
//
// First product: K is the left factor of the tiles, 16 keys by 32 head dims, and is read in place. q is the right
// factor, in pairs of head dims, with a column for each row of the block. Second product: AVX-512's dot product of
// pairs of bfloat16, two keys at a time. The probabilities are rounded to bfloat16, as in flash_fwd_kernel_amx.h.
#pragma once

#include "products_amx.h"
#include "row_block_decode.h"

namespace flash::cpu::FLASH_CPU_NAMESPACE {

constexpr int kAmxDecodeBlockN = 128;  // keys of a step

class AmxDecode : public RowBlockDecode<AmxDecode, BFloat16, kAmxDecodeBlockN> {
    using Base = RowBlockDecode<AmxDecode, BFloat16, kAmxDecodeBlockN>;
    friend Base;
    friend Base::RowBlockBase;
    using Float = Vec<float>;
    static constexpr int kBlockN = kAmxDecodeBlockN;
    static constexpr int kKeyStep = kTileRows;  // tiles begin at the same keys whatever the other rows see
    static constexpr int kColumns = kAmxBlock;  // of a tile of K

public:
    static constexpr int kMaxGroupRows = 8;  // with 16, flash_fwd_kernel_amx.h is faster (Xeon, d = 128)

    // True for a group that runs here. The rows of the sequence decide, and not those of the block, so that the bits of
    // a row do not depend on the number of threads.
    static bool takes(const Flash_fwd_params &params, const RowBlock &block) {
        return Group<BFloat16>{params, block.bidb, block.bidh_k}.rows() <= kMaxGroupRows && params.rng_state == nullptr;
    }

    static void run(const Flash_fwd_params &params, const RowBlock &block, void *scratch) {
        const TileConfig tiles(int(block.rows));
        Base::run(params, block, scratch);
    }

private:
    static constexpr int kPairsOfTile = kColumns / 2 * kMaxGroupRows;  // of q

    struct Shared : Base::Shared {
        float *s = nullptr;         // [kBlockN][kPanel]: scores
        float *s_of_row = nullptr;  // [kMaxGroupRows][kBlockN]
        BFloat16 *p = nullptr;      // [kMaxGroupRows][kBlockN]: probabilities
        BFloat16 *k = nullptr;      // [16][d_padded]: a copy of K, where the tiles can't read it in place

        Shared(Scratch &memory, const Flash_fwd_params &params) : Base::Shared(memory, params) {
            memory.take(s, kBlockN * kPanel);
            memory.take(s_of_row, kMaxGroupRows * kBlockN);
            memory.take(p, kMaxGroupRows * kBlockN);
            memory.take(k, int64_t(kTileRows) * round_up(params.d, kColumns));
        }
    };

    AmxDecode(const Flash_fwd_params &params, const RowBlock &block, char *scratch, const Shared &shared,
              int64_t next_head)
        : Base(params, block, scratch, shared, next_head, round_up(params.d_v, kColumns)),
          d_padded_(round_up(params.d, kColumns)),
          shared_(shared) {
        scratch_.take(q_, int64_t(d_padded_ / kColumns) * kPairsOfTile);
    }

    // q_[tile][pair][kMaxGroupRows], 0 beyond the rows and the head dim.
    void load_q(const Panel &p) {
        std::memset(q_, 0, sizeof(uint32_t) * size_t(d_padded_ / kColumns) * kPairsOfTile);
        for (int row = 0; row < p.rows; ++row) {
            const BFloat16 *const from = row_ptr(params_.q, p.row + row);
            for (int c = 0; c < d_; c += 2) {
                std::memcpy(q_ + c / 2 * kMaxGroupRows + row, from + c, c + 1 < d_ ? 4 : 2);
            }
        }
    }

    void step_vecs(const Panel &p, int, int n_begin, int n_first, int n_last, bool masked) {
        const int keys = n_last - n_first, from = n_first - n_begin;
        const BFloat16 *const *k = stream_ + from;
        // The scores of one row are stored with the keys side by side.
        const bool has_keys_in_lanes = p.rows == 1 && !score_mod_.is_on();
        float *const s = has_keys_in_lanes ? shared_.s_of_row : shared_.s;
        const int s_stride = has_keys_in_lanes ? 1 : kPanel;
        const int tiles = d_padded_ / kColumns;
        if (tiles == 1)
            scores<1>(k, keys, s, s_stride);
        else if (tiles == 2)
            scores<2>(k, keys, s, s_stride);
        else if (tiles == 3)
            scores<3>(k, keys, s, s_stride);
        else if (tiles == 4)
            scores<4>(k, keys, s, s_stride);
        else
            scores<0>(k, keys, s, s_stride);
        make_logits(p, shared_.s, 1, n_first, keys);
        Float alpha[1];
        softmax(p, n_first, keys, masked, has_keys_in_lanes, alpha);
        for (int row = 0; row < p.rows;) {
            const int left = p.rows - row, tile = masked || left == 1 ? 1 : left < 4 ? 2 : 4;
            if (masked)
                output_of_row_masked(p, alpha[0][row], row, n_first, from, keys);
            else if (tile == 4)
                output<4>(alpha, row, n_first, from, keys);
            else if (tile == 2)
                output<2>(alpha, row, n_first, from, keys);
            else
                output<1>(alpha, row, n_first, from, keys);
            row += tile;
        }
    }

    // Keys of a tile: rows[i] = rows[0] + i * stride.
    struct KeyTile {
        const BFloat16 *rows;
        int64_t stride;
    };

    // A tile for the keys k[0] to k[15]; the first `keys` of them are used. The tile points into the tensor if the keys
    // are evenly spaced in memory and the head dim is a multiple of 32. Otherwise the keys are copied.
    KeyTile tile_of_keys(const BFloat16 *const *k, int keys) const {
        bool is_even = keys >= kTileRows && d_ == d_padded_;
        if (is_even && params_.block_table != nullptr) {
            for (int i = 1; i < kTileRows; ++i) is_even &= k[i] == k[0] + i * params_.k.row_stride;
        }
        if (is_even) return {k[0], params_.k.row_stride};
        BFloat16 *const copies = shared_.k;
        std::memset(copies, 0, sizeof(BFloat16) * size_t(kTileRows) * d_padded_);
        for (int i = 0; i < std::min(keys, kTileRows); ++i) {
            std::memcpy(copies + i * d_padded_, k[i], sizeof(BFloat16) * size_t(d_));
        }
        compiler_barrier();
        return {copies, d_padded_};
    }

    // s[key][row] of a step; k points to the first key in stream_. kTiles: tiles of q, which stay in registers, or 0
    // for more of them than there are registers.
    template <int kTiles>
    FLASH_NOINLINE void scores(const BFloat16 *const *k, int keys, float *s, int s_stride) const {
        compiler_barrier();
        if constexpr (kTiles > 0) _tile_loadd(4, q_, kMaxGroupRows * 4);
        if constexpr (kTiles > 1) _tile_loadd(5, q_ + kPairsOfTile, kMaxGroupRows * 4);
        if constexpr (kTiles > 2) _tile_loadd(6, q_ + 2 * kPairsOfTile, kMaxGroupRows * 4);
        if constexpr (kTiles > 3) _tile_loadd(7, q_ + 3 * kPairsOfTile, kMaxGroupRows * 4);
        for (int n = 0; n < keys; n += kTileRows) {
            const KeyTile tile = tile_of_keys(k + n, keys - n);
            const BFloat16 *const rows = tile.rows;
            const int64_t stride = tile.stride * 2;
            _tile_zero(0);
            if constexpr (kTiles > 0) {
                prefetch_lines(k + n + kAhead, 0);
                _tile_loadd(1, rows, stride);
                _tile_dpbf16ps(0, 1, 4);
            }
            if constexpr (kTiles > 1) {
                prefetch_lines(k + n + kAhead, kColumns);
                _tile_loadd(2, rows + kColumns, stride);
                _tile_dpbf16ps(0, 2, 5);
            }
            if constexpr (kTiles > 2) {
                prefetch_lines(k + n + kAhead, 2 * kColumns);
                _tile_loadd(1, rows + 2 * kColumns, stride);
                _tile_dpbf16ps(0, 1, 6);
            }
            if constexpr (kTiles > 3) {
                prefetch_lines(k + n + kAhead, 3 * kColumns);
                _tile_loadd(2, rows + 3 * kColumns, stride);
                _tile_dpbf16ps(0, 2, 7);
            }
            if constexpr (kTiles == 0) {
                for (int c = 0; c < d_padded_; c += kColumns) {
                    prefetch_lines(k + n + kAhead, c);
                    _tile_loadd(4, q_ + c / kColumns * kPairsOfTile, kMaxGroupRows * 4);
                    _tile_loadd(1, rows + c, stride);
                    _tile_dpbf16ps(0, 1, 4);
                }
            }
            _tile_stored(0, s + n * s_stride, s_stride * 4);
        }
        compiler_barrier();
    }

    // Scores [key][row] become probabilities [row][key]; alpha: what rescales the sums of each row so far.
    FLASH_NOINLINE void softmax(const Panel &p, int n_first, int keys, bool masked, bool has_keys_in_lanes,
                                Float *alpha) {
        const Float minus_inf = broadcast(-std::numeric_limits<float>::infinity());
        Float row_max[1] = {minus_inf}, safe_m[1], sum[1] = {};
        for (int row = 0; row < p.rows; row += 4) {
            const int rows = std::min(p.rows - row, 4);
            Float largest[4] = {minus_inf, minus_inf, minus_inf, minus_inf};
            for (int n = 0; n < keys; n += kTileRows) {
                Float x[4];
                if (has_keys_in_lanes)
                    x[0] = load<float>(shared_.s_of_row + n);
                else
                    transpose_four_rows(shared_.s + n * kPanel + row, x);
                for (int r = 0; r < rows; ++r) {
                    if (masked || n + kTileRows > keys) x[r] = mask_keys(p, row + r, x[r], n_first, n, keys);
                    store<float>(shared_.s_of_row + (row + r) * kBlockN + n, x[r]);
                    largest[r] = max<float>(x[r], largest[r]);
                }
            }
            for (int r = 0; r < rows; ++r) row_max[0][row + r] = _mm512_reduce_max_ps(largest[r]);
        }
        update_max<float, 1>(row_max, scale_log2_, p.state, safe_m, alpha);
        const Float scale = broadcast(scale_log2_);
        for (int row = 0; row < p.rows; ++row) {
            const Float m = broadcast<float>(safe_m[0][row]);
            Float total{};
            for (int n = 0; n < keys; n += kTileRows) {
                const Float s = load<float>(shared_.s_of_row + row * kBlockN + n);
                const Float e = exp2_nonpositive<float>((s - m) * scale, kExp2BFloat16);
                total += e;
                _mm256_store_si256(reinterpret_cast<__m256i *>(shared_.p + row * kBlockN + n),
                                   (__m256i)_mm512_cvtneps_pbh(e));
            }
            sum[0][row] = _mm512_reduce_add_ps(total);
        }
        update_sum<float, 1>(sum, alpha, p.state);
    }

    // Scores of a row with the keys n to n + 15 of a step; -inf for keys that the row does not see.
    FLASH_INLINE static Float mask_keys(const Panel &p, int row, Float s, int n_first, int n, int keys) {
        const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const IntVec<float> key = (IntVec<float>)lane + n;
        const int lo = int(p.keys.lo[row]) - n_first, hi = std::min(int(p.keys.hi[row]) - n_first, keys);
        IntVec<float> is_seen = (key >= lo) & (key < hi);
        if (p.keys.has_gaps())
            is_seen &= (key < int(p.keys.gap_lo[row]) - n_first) | (key >= int(p.keys.gap_hi[row]) - n_first);
        return is_seen ? s : broadcast(-std::numeric_limits<float>::infinity());
    }

    // rows[row][key] = s[key][row] for 16 keys and 4 rows.
    FLASH_INLINE static void transpose_four_rows(const float *s, Float *rows) {
        __m512 x[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            x[i] = _mm512_castps128_ps512(_mm_load_ps(s + i * kPanel));
            x[i] = _mm512_insertf32x4(x[i], _mm_load_ps(s + (i + 4) * kPanel), 1);
            x[i] = _mm512_insertf32x4(x[i], _mm_load_ps(s + (i + 8) * kPanel), 2);
            x[i] = _mm512_insertf32x4(x[i], _mm_load_ps(s + (i + 12) * kPanel), 3);
        }
        const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(x[0], x[1]));
        const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(x[2], x[3]));
        const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(x[0], x[1]));
        const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(x[2], x[3]));
        rows[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(low01, low23));
        rows[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low01, low23));
        rows[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high01, high23));
        rows[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high01, high23));
    }

    // o = alpha * o + sum over keys of p * v, for the rows [row, row + kRows).
    template <int kRows>
    void output(const Float *alpha, int row, int n_first, int from, int keys) const {
        int c = 0;
        const auto add = [&](auto tiles) {
            constexpr int kTiles = decltype(tiles)::value;
            for (; c + kTiles * kColumns <= d_v_; c += kTiles * kColumns) {
                add_values<kRows, kTiles, false>(alpha, row, c, n_first, from, keys);
            }
        };
        if constexpr (kRows <= 2) add(std::integral_constant<int, 4>());
        add(std::integral_constant<int, 2>());
        add(std::integral_constant<int, 1>());
        if (c < d_v_) add_values<kRows, 1, true>(alpha, row, c, n_first, from, keys);
    }

    template <int kRows, int kTiles, bool kIsPartial>
    FLASH_NOINLINE void add_values(const Float *alpha, int row, int c, int n_first, int from, int keys) const {
        const bool prefetches = row == 0 && c == 0;
        const BFloat16 *const *const v = values_ + from;
        const auto *const p = reinterpret_cast<const int32_t *>(shared_.p + row * kBlockN);  // pairs
        Float acc[kRows][kTiles][2];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (int t = 0; t < kTiles; ++t) acc[r][t][0] = acc[r][t][1] = Float{};
        }
        int n = 0;
        for (; n + 2 <= keys; n += 2) {
            if (prefetches) {
                prefetch_after_value(n + kAhead, n_first, from, keys);
                prefetch_after_value(n + 1 + kAhead, n_first, from, keys);
            }
            add_pair<kRows, kTiles, kIsPartial>(v[n] + c, v[n + 1] + c, d_v_ - c, p + n / 2, acc);
        }
        if (n < keys) add_pair<kRows, kTiles, kIsPartial>(v[n] + c, kZeros + c, d_v_ - c, p + n / 2, acc);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (int t = 0; t < kTiles; ++t) add_to_o(row + r, c + t * kColumns, alpha[0][row + r], acc[r][t]);
        }
    }

    // acc[row][tile] += p of two keys * v of two keys; acc has the columns in the order of unpack instructions.
    template <int kRows, int kTiles, bool kIsPartial>
    FLASH_INLINE static void add_pair(const BFloat16 *even, const BFloat16 *odd, int width, const int32_t *p,
                                      Float (*acc)[kTiles][2]) {
#pragma GCC unroll 4
        for (int t = 0; t < kTiles; ++t) {
            const __m512i a = load_columns<kIsPartial>(even + t * kColumns, width);
            const __m512i b = load_columns<kIsPartial>(odd + t * kColumns, width);
            const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                const __m512i p_r = _mm512_set1_epi32(p[r * (kBlockN / 2)]);
                acc[r][t][0] = _mm512_dpbf16_ps(acc[r][t][0], (__m512bh)low, (__m512bh)p_r);
                acc[r][t][1] = _mm512_dpbf16_ps(acc[r][t][1], (__m512bh)high, (__m512bh)p_r);
            }
        }
    }

    template <bool kIsPartial>
    FLASH_INLINE static __m512i load_columns(const BFloat16 *v, int width) {
        if constexpr (kIsPartial) return _mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << width) - 1), v);
        return _mm512_loadu_si512(v);
    }

    // o = alpha * o + acc for the columns [c, c + 32) of a row. acc[0] and acc[1] have the columns 8 i + j and 8 i + 4
    // + j in lane 4 i + j.
    FLASH_INLINE void add_to_o(int row, int c, float alpha, const Float (&acc)[2]) const {
        const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
        const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        float *const o = o_ + row * d_v_padded_ + c;
        const Float factor = broadcast(alpha);
        store<float>(o, fma<float>(factor, load<float>(o), _mm512_permutex2var_ps(acc[0], first, acc[1])));
        store<float>(o + 16, fma<float>(factor, load<float>(o + 16), _mm512_permutex2var_ps(acc[0], second, acc[1])));
    }

    // The same for one row of a masked step. Keys that it does not see add nothing, even if their v is infinite or NaN.
    FLASH_NOINLINE void output_of_row_masked(const Panel &panel, float alpha, int row, int n_first, int from,
                                             int keys) const {
        const BFloat16 *const p_of_row = shared_.p + row * kBlockN;
        const auto v_of = [&](int n) {
            const bool is_seen =
                n < keys && panel.keys.is_seen(row, n_first + n) && !(score_mod_.hides_keys() && p_of_row[n].bits == 0);
            return is_seen ? values_[from + n] : kZeros;
        };
        const auto *const p = reinterpret_cast<const int32_t *>(p_of_row);
        for (int c = 0; c < d_v_; c += kColumns) {
            Float acc[1][1][2] = {};
            for (int n = 0; n < keys; n += 2) {
                add_pair<1, 1, true>(v_of(n) + c, v_of(n + 1) + c, std::min(d_v_ - c, kColumns), p + n / 2, acc);
            }
            add_to_o(row, c, alpha, acc[0][0]);
        }
    }

    static constexpr BFloat16 kZeros[kMaxHeadDim] = {};

    const int d_padded_;
    const Shared &shared_;
    uint32_t *q_ = nullptr;  // [d_padded / 32][16][kMaxGroupRows]: pairs of head dims of q
};

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
