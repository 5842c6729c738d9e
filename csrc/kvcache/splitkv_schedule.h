// Which keys a CTA works on. The lengths lie in GPU memory, so every CTA computes its part from all of them.
//
// The keys that a sequence sees are cut into units. Chosen splits: a unit is a few keys, and the units of all sequences
// and heads, one after the other, are cut into one piece of equal size for each CTA. A piece may begin and end within a
// head; then the head's partial results are combined. Fixed splits: a unit is a split, whose partial result does not
// depend on other sequences.
#pragma once

#include <cutlass/fast_math.h>

#include "../common/block_info.h"
#include "../common/uniform.h"

namespace flash::kvcache {

// How one call is cut, computed on the host from shapes alone.
struct SplitkvPlan {
    int tile_rows;                 // rows of a tile: the queries of all heads that share a key/value head
    int row_tiles;                 // tiles that cover the rows of one key/value head of one sequence
    int pieces;                    // CTAs for each row tile
    int cluster;                   // CTAs that work on one head together; 0: pieces
    int max_splits;                // slots for the splits of a head; 0: all keys are cut into pieces of equal size
    int log2_unit;                 // keys of a unit where the splits are chosen
    bool is_aligned;               // K and V can be read 16 bytes at a time
    bool is_q_aligned;             // like is_aligned
    cutlass::FastDivmod by_ratio;  // by the query heads that share a key/value head
    bool follows_append = false;   // the kernel before it in the stream is append_kv_kernel
    int aligned_unit = 0;          // keys of a unit; units begin at multiples of it. 0: log2_unit counts
    float sum_factor = 1.0f;       // turns the sums in the slots into sums of probabilities

    constexpr int64_t slots(const Flash_fwd_params &params) const {  // of partial results, for each row tile
        return max_splits == 0 ? int64_t{2} * pieces : int64_t{params.b} * params.h_k * max_splits;
    }
    // True if a CTA of the combine kernel has a piece, because there are fewer of them than heads; else it has a head.
    constexpr bool combines_by_piece(const Flash_fwd_params &params) const {
        return max_splits == 0 && pieces < int64_t{params.b} * params.h_k;
    }
};

__device__ __forceinline__ int warp_index() {
    return uniform(threadIdx.x / 32);
}

// The units of one sequence, the same for all of its heads.
struct Units {
    int begin, end;  // the keys that some query sees
    int origin;      // where unit 0 begins; at most begin
    int length;      // keys of a unit
    int count;       // at least 1, so that rows without a key are stored

    __device__ Units(const Flash_fwd_params &params, const SplitkvPlan &plan, const Sequence &sequence) {
        const KeyRange<true> range(params, sequence.seqlen_q, sequence.seqlen_k);
        begin = range.begin_key(0);
        end = max(range.end_key(sequence.seqlen_q - 1), begin);
        origin = begin;
        length = 1 << plan.log2_unit;
        count = static_cast<int>((unsigned(end - begin) + (1u << plan.log2_unit) - 1) >> plan.log2_unit);
        if (plan.max_splits > 0 || plan.aligned_unit > 0) {
            const int split_keys = plan.aligned_unit > 0 ? plan.aligned_unit : params.cache.split_keys;
            const Fixed fixed = fix(begin, end, count, split_keys, params.cache.num_splits, length);
            origin = fixed.origin;
            length = fixed.length;
            count = fixed.count;
        }
        count = max(count, 1);
    }

    __device__ int first_key(int unit) const {  // the end of the keys if unit is count
        const unsigned key = unsigned(origin) + unsigned(unit) * unsigned(length);
        return static_cast<int>(min(max(key, unsigned(begin)), unsigned(end)));
    }

private:
    struct Fixed {
        int origin, length, count;
    };
    // Splits of fixed length or number. Not inlined: the divisions take much code, and the function is used often.
    __device__ __noinline__ static Fixed fix(int begin, int end, int units, int split_keys, int num_splits, int unit) {
        const int length = split_keys > 0 ? split_keys : max((units - 1) / num_splits + 1, 1) * unit;
        const int origin = split_keys > 0 ? begin / length * length : begin;
        return {origin, length, static_cast<int>((unsigned(end - origin) + unsigned(length) - 1) / unsigned(length))};
    }
};

// A unit of one head of one sequence.
struct UnitPlace {
    int bidb, bidh_k, unit;
    int head_begin;  // the number of the head's first unit

    // Where the units go on after `run` units of a head that has `count`.
    __device__ UnitPlace after(int run, int count, int h_k) const {
        const int next = unit + run;
        const bool is_head_done = next == count, is_sequence_done = is_head_done && bidh_k + 1 == h_k;
        return {bidb + is_sequence_done, is_sequence_done ? 0 : bidh_k + is_head_done, is_head_done ? 0 : next, 0};
    }
};

// The units of all sequences and heads, in the order sequence, head, unit; the host makes sure that 32 bits count them.
// Every warp computes it for itself, so that no warp waits for another.
class Schedule {
public:
    __device__ Schedule(const Flash_fwd_params &params, const SplitkvPlan &plan)
        : params(params), plan(plan), per_lane((params.b + 31) / 32) {
        const int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int i = 0; i < per_lane; ++i) {
            of_this_lane += units_of(lane * per_lane + i);
        }
        int sum = of_this_lane;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(kAllLanes, sum, step);
            sum += lane >= step ? other : 0;
        }
        before = sum - of_this_lane;
        const int total = uniform(__shfl_sync(kAllLanes, sum, 31));
        // A piece has `least` units or one more; chosen splits have at least two units, so some pieces may be empty.
        const int most = plan.max_splits > 0 ? total : total / 2;
        pieces = max(min(plan.pieces, most), 1);
        least = total / pieces;
        longer = total - least * pieces;
    }

    // The first unit of a piece; the number of units from the last piece on.
    __device__ int begin_of(int piece) const { return min(piece, pieces) * least + min(piece, longer); }
    // The piece that holds a unit.
    __device__ int piece_of(int unit) const {
        const int in_longer = longer * (least + 1);
        return unit < in_longer ? unit / (least + 1) : longer + (unit - in_longer) / least;
    }

    // Called by all lanes.
    __device__ UnitPlace find(int unit) const {
        UnitPlace place{};
        const bool is_here = unit >= before && unit < before + of_this_lane;
        if (is_here) {
            int bidb = threadIdx.x % 32 * per_lane, left = unit - before;
#pragma unroll 1
            for (int units = units_of(bidb); left >= units; units = units_of(++bidb)) {
                left -= units;
            }
            const int count = count_of(bidb), head = left / count;
            left -= head * count;
            place = {bidb, head, left, unit - left};
        }
        const int source = __ffs(__ballot_sync(kAllLanes, is_here)) - 1;
        const auto from_source = [&](int x) { return uniform(__shfl_sync(kAllLanes, x, source)); };
        return {from_source(place.bidb), from_source(place.bidh_k), from_source(place.unit),
                from_source(place.head_begin)};
    }

    // The number of the head's first unit. Called by all lanes.
    __device__ int head_begin_of(int bidb, int bidh_k) const {
        const int source = bidb / per_lane;
        int first = before;
        if (static_cast<int>(threadIdx.x % 32) == source) {
#pragma unroll 1
            for (int other = source * per_lane; other < bidb; ++other) {
                first += units_of(other);
            }
        }
        return uniform(__shfl_sync(kAllLanes, first, source)) + bidh_k * count_of(bidb);
    }

private:
    static constexpr unsigned kAllLanes = 0xffffffffu;
    const Flash_fwd_params &params;
    const SplitkvPlan &plan;
    const int per_lane;            // sequences
    int before, of_this_lane = 0;  // units
    int pieces, least, longer;     // pieces in use, units of each, pieces that have one unit more

    __device__ int count_of(int bidb) const { return Units(params, plan, cache_sequence(params, bidb)).count; }
    __device__ int units_of(int bidb) const { return bidb < params.b ? count_of(bidb) * params.h_k : 0; }
};

}  // namespace flash::kvcache
