// Which keys a CTA works on. The lengths lie in GPU memory, so every CTA computes its part from all of them.
//
// The keys that a sequence sees are cut into units. Chosen splits: a unit is a few keys, and the units of all sequences
// and heads, one after the other, are cut into one piece of equal size for each CTA. A piece may begin and end within a
// head; then the head's partial results are combined. Fixed splits: a unit is a split, whose partial result does not
// depend on other sequences.
#pragma once

#include <cutlass/fast_math.h>

#include "../common/block_info.h"

namespace flash::kvcache {

// How one call is cut, computed on the host from shapes alone.
struct SplitkvPlan {
    int tile_rows;                 // rows of a tile: the queries of all heads that share a key/value head
    int row_tiles;                 // tiles that cover the rows of one key/value head of one sequence
    int pieces;                    // CTAs for each row tile
    int max_splits;                // slots for the splits of a head; 0: all keys are cut into pieces of equal size
    int log2_unit;                 // keys of a unit where the splits are chosen
    bool is_aligned;               // K and V can be loaded 16 bytes at a time
    cutlass::FastDivmod by_ratio;  // by the query heads that share a key/value head

    constexpr int64_t slots(const Flash_fwd_params &params) const {  // of partial results, for each row tile
        return max_splits == 0 ? int64_t{2} * pieces : int64_t{params.b} * params.h_k * max_splits;
    }
};

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
        if (params.cache.split_keys > 0) {
            length = params.cache.split_keys;
            origin = begin / length * length;
        } else if (params.cache.num_splits > 0) {
            length = max(ceil_div(chosen_units(plan), params.cache.num_splits), 1) << plan.log2_unit;
        }
        const bool is_fixed = plan.max_splits > 0;
        count = max(is_fixed ? ceil_div(end - origin, length) : chosen_units(plan), 1);
    }

    __device__ int first_key(int unit) const {
        return static_cast<int>(min(max(origin + int64_t(unit) * length, int64_t(begin)), int64_t(end)));
    }

private:
    __device__ int chosen_units(const SplitkvPlan &plan) const {
        return static_cast<int>((unsigned(end - begin) + (1u << plan.log2_unit) - 1) >> plan.log2_unit);
    }
    __device__ static int ceil_div(int a, int b) {
        return static_cast<int>((unsigned(a) + unsigned(b) - 1) / unsigned(b));
    }
};

// The sum over the threads before this one, and over all. shared: [kThreads / 32].
template <int kThreads>
struct BlockScan {
    int before, total;

    __device__ BlockScan(int value, int *shared) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        int sum = value;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, sum, step);
            sum += lane >= step ? other : 0;
        }
        if (lane == 31 && warp < kThreads / 32) {
            shared[warp] = sum;
        }
        __syncthreads();
        before = sum - value;
        total = 0;
#pragma unroll
        for (int i = 0; i < kThreads / 32; ++i) {
            before += i < warp ? shared[i] : 0;
            total += shared[i];
        }
        __syncthreads();  // shared may be written again
    }
};

// A unit of one head of one sequence.
struct Place {
    int bidb, bidh_k, unit;
    int head_begin;  // the number of the head's first unit
};

// The units of all sequences and heads, in the order sequence, head, unit; the host makes sure that 32 bits count them.
// All threads of a CTA build it together; the first kThreads have a part each.
class Schedule {
    static constexpr int kThreads = 128;

public:
    struct Shared {
        int sums[kThreads / 32];
        Place place;
    };

    __device__ Schedule(const Flash_fwd_params &params, const SplitkvPlan &plan, Shared &shared)
        : params(params), plan(plan), shared(shared), per_thread((params.b + kThreads - 1) / kThreads) {
        int sum = 0;
        if (threadIdx.x < kThreads) {
#pragma unroll 1
            for (int i = 0; i < per_thread; ++i) {
                sum += units_of(threadIdx.x * per_thread + i);
            }
        }
        const BlockScan<kThreads> scan(sum, shared.sums);
        before = scan.before;
        of_this_thread = sum;
        // A piece has `least` units or one more; chosen splits have at least two units, so some pieces may be empty.
        const int most = plan.max_splits > 0 ? scan.total : scan.total / 2;
        pieces = max(min(plan.pieces, most), 1);
        least = scan.total / pieces;
        longer = scan.total - least * pieces;
    }

    // The first unit of a piece; the number of units from the last piece on.
    __device__ int begin_of(int piece) const { return min(piece, pieces) * least + min(piece, longer); }
    // The piece that holds a unit.
    __device__ int piece_of(int unit) const {
        const int in_longer = longer * (least + 1);
        return unit < in_longer ? unit / (least + 1) : longer + (unit - in_longer) / least;
    }

    // Called by all threads.
    __device__ Place find(int unit) {
        if (unit >= before && unit < before + of_this_thread) {
            int bidb = threadIdx.x * per_thread, left = unit - before;
#pragma unroll 1
            for (int units = units_of(bidb); left >= units; units = units_of(++bidb)) {
                left -= units;
            }
            const int count = count_of(bidb), head = left / count;
            left -= head * count;
            shared.place = {bidb, head, left, unit - left};
        }
        __syncthreads();
        const Place place = shared.place;
        __syncthreads();  // shared may be written again
        return place;
    }

private:
    const Flash_fwd_params &params;
    const SplitkvPlan &plan;
    Shared &shared;
    const int per_thread;        // sequences
    int before, of_this_thread;  // units
    int pieces, least, longer;   // pieces in use, units of each, pieces that have one unit more

    __device__ int count_of(int bidb) const { return Units(params, plan, cache_sequence(params, bidb)).count; }
    __device__ int units_of(int bidb) const { return bidb < params.b ? count_of(bidb) * params.h_k : 0; }
};

}  // namespace flash::kvcache
