// Which keys a CTA works on. The lengths lie in GPU memory, so every CTA computes its part from all of them.
//
// The keys that a sequence sees are cut into units. Chosen splits: a unit is a few keys, and the units of all sequences
// and heads, one after the other, are cut into one piece of equal size for each CTA. A piece may begin and end within a
// head; then the head's partial results are combined. Fixed splits: a unit is a split, whose partial result does not
// depend on other sequences.
#pragma once

#include "../common/block_info.h"
#include "splitkv.h"

namespace flash::kvcache {

// The units of one sequence, the same for all of its heads.
struct Units {
    int begin, end;  // the keys that some query sees
    int origin;      // where unit 0 begins; at most begin
    int length;      // keys of a unit
    int count;       // at least 1, so that rows without a key are stored

    // kUnit: keys of a unit where the splits are chosen, and what splits are rounded to where their number is given.
    __device__ Units(const Flash_fwd_params &params, const Sequence &sequence, int kUnit) {
        const KeyRange<true> range(params, sequence.seqlen_q, sequence.seqlen_k);
        begin = range.begin_key(0);
        end = max(range.end_key(sequence.seqlen_q - 1), begin);
        origin = begin;
        length = kUnit;
        if (params.cache.split_keys > 0) {
            length = params.cache.split_keys;
            origin = begin / length * length;
        } else if (params.cache.num_splits > 0) {
            const int units = (end - begin + kUnit - 1) / kUnit;
            length = max((units + params.cache.num_splits - 1) / params.cache.num_splits, 1) * kUnit;
        }
        count = max(static_cast<int>((int64_t(end) - origin + length - 1) / length), 1);
    }

    __device__ int first_key(int unit) const {
        return static_cast<int>(min(max(origin + int64_t(unit) * length, int64_t(begin)), int64_t(end)));
    }
};

// Sums over the threads of a CTA. kThreads: a multiple of 32, at most 1024.
template <int kThreads>
struct BlockScan {
    int64_t before;  // sum of the threads before this one
    int64_t total;

    __device__ BlockScan(int64_t value, int64_t *shared) {  // shared: [kThreads / 32]
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        int64_t sum = value;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int64_t other = __shfl_up_sync(0xffffffffu, sum, step);
            sum += lane >= step ? other : 0;
        }
        if (lane == 31) {
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

// A run of units of one head of one sequence.
struct Place {
    int bidb, bidh_k;
    int unit;  // the first one
};

// The units of all sequences and heads, in the order sequence, head, unit. Built by all threads of a CTA together.
template <int kThreads, int kUnit>
class Schedule {
public:
    struct Shared {
        int64_t sums[kThreads / 32];
        Place place;
        int64_t place_begin;
    };

    __device__ Schedule(const Flash_fwd_params &params, Shared &shared)
        : params(params), shared(shared), per_thread((params.b + kThreads - 1) / kThreads) {
        int64_t sum = 0;
        for (int i = 0; i < per_thread; ++i) {
            sum += units_of(threadIdx.x * per_thread + i);
        }
        const BlockScan<kThreads> scan(sum, shared.sums);
        before = scan.before;
        in_all = scan.total;
        of_this_thread = sum;
    }

    // The pieces that are not empty. Chosen splits: a piece holds at least two units.
    __device__ int64_t used_pieces(const SplitkvPlan &plan) const {
        const int64_t most = plan.max_splits > 0 ? in_all : in_all / 2;
        return max(min(int64_t(plan.pieces), most), int64_t(1));
    }
    // The first unit of a piece; the number of units from the last piece on.
    __device__ int64_t begin_of(int64_t piece, int64_t used_pieces) const {
        return in_all * min(piece, used_pieces) / used_pieces;
    }
    // The piece that holds a unit.
    __device__ int64_t piece_of(int64_t unit, int64_t used_pieces) const {
        return ((unit + 1) * used_pieces - 1) / in_all;
    }

    // Where a unit lies, and the number of the first unit of that head. Called by all threads.
    struct Found {
        Place place;
        int64_t head_begin;
    };
    __device__ Found find(int64_t unit) {
        if (unit >= before && unit < before + of_this_thread) {
            int bidb = threadIdx.x * per_thread;
            int64_t left = unit - before;
            for (int64_t units = units_of(bidb); left >= units; units = units_of(++bidb)) {
                left -= units;
            }
            const int count = count_of(bidb), head = static_cast<int>(left / count);
            shared.place = {bidb, head, static_cast<int>(left - int64_t(head) * count)};
            shared.place_begin = unit - shared.place.unit;
        }
        __syncthreads();
        const Found found{shared.place, shared.place_begin};
        __syncthreads();  // shared may be written again
        return found;
    }

private:
    const Flash_fwd_params &params;
    Shared &shared;
    const int per_thread;  // sequences
    int64_t before, of_this_thread, in_all;

    __device__ int count_of(int bidb) const { return Units(params, sequence(params, bidb), kUnit).count; }
    __device__ int64_t units_of(int bidb) const { return bidb < params.b ? int64_t(count_of(bidb)) * params.h_k : 0; }
};

}  // namespace flash::kvcache
