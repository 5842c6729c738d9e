// Dropout: computes which probabilities of a panel are kept (../common/philox.h), and applies it. Philox runs in
// vectors, one call in each lane of 64 bits.
#pragma once

#include "../common/philox.h"
#include "rows.h"
#include "simd.h"

namespace flash::cpu::FLASH_CPU_NAMESPACE {

typedef uint64_t WideVec __attribute__((vector_size(kVecBytes), may_alias));
constexpr int kCalls = kVecBytes / 8;  // Philox calls per vector
typedef uint16_t NarrowVec __attribute__((vector_size(2 * kCalls), may_alias, aligned(2)));

// The product of the lower halves of each lane.
FLASH_INLINE WideVec multiply_low_halves(WideVec a, WideVec b) {
#if FLASH_CPU_ISA == 3
    return (WideVec)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif FLASH_CPU_ISA == 2
    return (WideVec)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#else
    return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// Groups of vectors that are computed together and share each round's keys; the registers limit their number.
#if FLASH_CPU_ISA == 3 || defined(__aarch64__)
constexpr int kChains = 4;
#else
constexpr int kChains = 2;
#endif

// philox4x32 in the lower halves of each lane; the upper ones are undefined.
FLASH_INLINE void philox(WideVec (&x)[kChains][4], uint32_t key0, uint32_t key1) {
    const WideVec factor0 = WideVec{} + 0xD2511F53u, factor1 = WideVec{} + 0xCD9E8D57u;
    for (int round = 0; round < kPhiloxRounds; ++round) {
        const WideVec round_key0 = WideVec{} + key0, round_key1 = WideVec{} + key1;
#pragma GCC unroll 4
        for (WideVec(&c)[4] : x) {
            const WideVec product0 = multiply_low_halves(c[0], factor0), product1 = multiply_low_halves(c[2], factor1);
            c[0] = (product1 >> 32) ^ c[1] ^ round_key0;
            c[1] = product1;
            c[2] = (product0 >> 32) ^ c[3] ^ round_key1;
            c[3] = product0;
        }
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

constexpr int kPairTile = 16;  // a tile of 16 queries and 16 keys; each Philox call gives the bits of 8 of its pairs

// keep[key][query] = 0xffff where the pair of the tile is kept, 0 where it is dropped, at least for the queries
// [begin, end).
FLASH_INLINE void draw_tile(const DropoutStream &stream, unsigned threshold, uint32_t tile_query, uint32_t tile_key,
                            int begin, int end, uint16_t (&keep)[kPairTile][kPairTile]) {
    WideVec lane{};
    for (int i = 0; i < kCalls; ++i) lane[i] = uint64_t(i);
    // Bits 16 to 31 of (last_dropped - bits) are set where bits >= threshold.
    const WideVec last_dropped = WideVec{} + (uint64_t(threshold) - 1);
    for (int query = 0; query < 8; query += kCalls) {
        const auto is_wanted = [=](int first) { return begin < first + kCalls && end > first; };
        if (!is_wanted(query) && !is_wanted(query + 8)) continue;
        for (int pair = 0; pair < 4; pair += kChains) {
            WideVec x[kChains][4];
            for (int chain = 0; chain < kChains; ++chain) {
                x[chain][0] = WideVec{} + (tile_query * 32 + uint32_t(query * 4 + pair + chain)) + lane * 4;
                x[chain][1] = WideVec{} + tile_key;
                x[chain][2] = WideVec{} + stream.head;
                x[chain][3] = WideVec{} + stream.offset;
            }
            philox(x, stream.key0, stream.key1);
#pragma GCC unroll 16
            for (int i = 0; i < 4 * kChains; ++i) {
                const int word = i % 4, key = 2 * (pair + i / 4) + word / 2 + word % 2 * 8;
                const WideVec bits = x[i / 4][word];
                const WideVec lower = last_dropped - (bits & 0xffff), upper = last_dropped - (bits >> 16 & 0xffff);
                *reinterpret_cast<NarrowVec *>(keep[key] + query) = __builtin_convertvector(lower >> 16, NarrowVec);
                *reinterpret_cast<NarrowVec *>(keep[key] + query + 8) = __builtin_convertvector(upper >> 16, NarrowVec);
            }
        }
    }
}

// Says which pairs of a panel's rows and a step's keys dropout keeps.
template <int kPanel>
class Dropout {
public:
    explicit Dropout(const Flash_fwd_params &params)
        : is_on(params.p_dropout > 0), scale(1 / (1 - params.p_dropout)), threshold_(params.dropout_threshold) {}

    void take(Scratch &scratch, int64_t keys) { scratch.take(keep_, is_on ? keys * kPanel : 0); }

    // keep(n)[i] = 0xffff where row + i of the group keeps key n_begin + n, 0 where it drops it.
    template <typename Element>
    FLASH_NOINLINE void draw(const Group<Element> &group, int64_t row, int rows, int n_begin, int keys) {
        const Flash_fwd_params &params = group.params;
        const int64_t ratio = params.h_h_k_ratio;
        for (int64_t head = 0; head < std::min<int64_t>(ratio, rows); ++head) {
            draw_head(group, row, rows, n_begin, keys, (row + head) % ratio);
        }
    }
    const uint16_t *keep(int n) const { return keep_ + n * kPanel; }

    const bool is_on;
    const double scale;  // factor of the probabilities that are kept

private:
    template <typename Element>
    void draw_head(const Group<Element> &group, int64_t row, int rows, int n_begin, int keys, int64_t head) {
        const Flash_fwd_params &params = group.params;
        const int64_t ratio = params.h_h_k_ratio;
        const DropoutStream stream(params.rng_state, int(group.bidb), params.h, int(group.bidh_k * ratio + head));
        // The head's rows among these are those of the queries [begin, end).
        const int64_t begin = (row - head + ratio - 1) / ratio, end = (row + rows - head + ratio - 1) / ratio;
        uint16_t tile[kPairTile][kPairTile];
        for (int64_t q = begin - begin % kPairTile; q < end; q += kPairTile) {
            const int first = int(std::max(begin - q, int64_t(0))), last = int(std::min<int64_t>(end - q, kPairTile));
            uint16_t *const to = keep_ + (q + first) * ratio + head - row;
            for (int n = n_begin - n_begin % kPairTile; n < n_begin + keys; n += kPairTile) {
                draw_tile(stream, threshold_, uint32_t(q / kPairTile), uint32_t(n / kPairTile), first, last, tile);
                const int key_end = std::min(n + kPairTile, n_begin + keys);
                for (int key = std::max(n, n_begin); key < key_end; ++key) {
                    const uint16_t *const from = tile[key - n] + first;
                    uint16_t *const to_key = to + (key - n_begin) * kPanel;
                    if (ratio == 1)
                        std::memcpy(to_key, from, sizeof(uint16_t) * size_t(last - first));
                    else
                        for (int i = 0; i < last - first; ++i) to_key[i * ratio] = from[i];
                }
            }
        }
    }

    const unsigned threshold_;
    uint16_t *keep_ = nullptr;  // [keys][kPanel]
};

// All bits of each lane, or none.
template <typename T>
FLASH_INLINE IntVec<T> kept_lanes(const uint16_t *keep) {
    typedef int16_t Flags __attribute__((vector_size(2 * kLanes<T>), may_alias, aligned(2)));
    return __builtin_convertvector(*reinterpret_cast<const Flags *>(keep), IntVec<T>);
}

// x = kept ? factor * x : 0 in `vecs` vectors of each key from the first lane on; keep is laid out in rows of
// kKeepStride.
template <typename T, int kStride, int kKeepStride>
FLASH_NOINLINE void drop(T *x, T factor, const uint16_t *keep, int keys, int vecs) {
    for (int n = 0; n < keys; ++n) {
        for (int j = 0; j < vecs; ++j) {
            T *x_n = x + n * kStride + j * kLanes<T>;
            const IntVec<T> kept = kept_lanes<T>(keep + n * kKeepStride + j * kLanes<T>);
            store<T>(x_n, (Vec<T>)((IntVec<T>)(load<T>(x_n) * broadcast<T>(factor)) & kept));
        }
    }
}

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
