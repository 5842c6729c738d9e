// Which keys a CTA works on. The lengths lie in GPU memory, so every CTA computes its part from all of them.
//
// The keys that a sequence sees are cut into units. Chosen splits: a unit is a few keys, and the units of all sequences
// and heads, one after the other, are cut into one piece of equal size for each CTA. A piece may begin and end within a
// head; then the head's partial results are combined. If all heads have as many units, pieces begin and end with heads
// as often as possible, which spares partial results. Fixed splits: a unit is a split, whose partial result does not
// depend on other sequences.
#pragma once

#include <cutlass/fast_math.h>

#include <climits>

#include "../common/block_info.h"

namespace flash::kvcache {

// The forms of the tiles. SplitkvTraits describes them.
enum class Form { few_rows, wide, cluster, warp_pairs, many_rows };
constexpr const char *name_of(Form form) {
    constexpr const char *kNames[] = {"few_rows", "wide", "cluster", "warp_pairs", "many_rows"};
    return kNames[static_cast<int>(form)];
}

// How one call is cut into pieces. The host computes it from shapes.
struct SplitkvPlan {
    Form form;                     // of splitkv
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
    int unit_keys = 0;             // keys of a unit; units begin at multiples of it. 0: log2_unit or num_splits counts
    cutlass::FastDivmod by_unit;   // by unit_keys
    float sum_factor = 1.0f;       // turns the sums in the slots into sums of probabilities
    int aligned_pieces = 0;        // pieces if all heads have as many units; they begin or end with heads. 0: `pieces`
    int group_heads = 1, group_pieces = 1;  // with aligned_pieces: so many heads are cut into so many pieces
    bool by_sequence = false;  // a piece has the same keys of all heads of a sequence, and a CTA for each of them

    // Sets aligned_pieces. pieces: divides `heads` or is a multiple of it, or is 0.
    void align_pieces(int pieces, int64_t heads) {
        aligned_pieces = pieces;
        group_heads = pieces > 0 && pieces < heads ? static_cast<int>(heads / pieces) : 1;
        group_pieces = pieces > heads ? static_cast<int>(pieces / heads) : 1;
    }
    // Units begin at multiples of `keys`.
    void align_units(int keys) {
        unit_keys = keys;
        by_unit = cutlass::FastDivmod(keys);
    }
    constexpr int heads_of_piece(const Flash_fwd_params &params) const { return by_sequence ? params.h_k : 1; }
    // The heads of a sequence that have separate units.
    constexpr int heads_with_units(const Flash_fwd_params &params) const { return by_sequence ? 1 : params.h_k; }
    constexpr int64_t ctas(const Flash_fwd_params &params) const { return int64_t{pieces} * heads_of_piece(params); }

    constexpr int64_t slots(const Flash_fwd_params &params) const {  // of partial results, for each row tile
        return max_splits == 0 ? 2 * ctas(params) : int64_t{params.b} * params.h_k * max_splits;
    }
    // True if a CTA of the combine kernel has the head that begins in a CTA of the kernel before, because there are
    // fewer of them than heads; else it has any head.
    constexpr bool combines_by_cta(const Flash_fwd_params &params) const {
        return max_splits == 0 && ctas(params) < int64_t{params.b} * params.h_k;
    }
    // Floats of SharedHead for each CTA of the combine kernel; fixed splits have none.
    constexpr int64_t shared_head_floats(const Flash_fwd_params &params) const {
        const int64_t heads = int64_t{params.b} * params.h_k;
        return max_splits > 0 ? 0 : 4 * (combines_by_cta(params) ? ctas(params) : heads);
    }
    // Floats of KvCache::scratch: SharedHead, then slots of `rows` rows.
    constexpr int64_t scratch_floats(const Flash_fwd_params &params, int64_t rows, int headdim) const {
        return shared_head_floats(params) + slots(params) * row_tiles * rows * (headdim + 2);
    }
};

// A head as the combine kernel sees it. The CTA in whose piece the head begins writes it. They lie at the start of
// KvCache::scratch: one for each head, or, if combines_by_cta, for each CTA.
struct alignas(16) SharedHead {
    int bidb, bidh_k;
    int piece;   // the first with keys of the head
    int pieces;  // with keys of the head; up to 1: there is nothing to combine
};

// True if `part` of `whole` CTAs are enough to keep the memory busy.
constexpr bool is_nearly_all_of(int64_t part, int64_t whole) {
    return part * 20 >= whole * 19;
}

// The most pieces, up to `pieces`, that begin or end with heads if all of `heads` heads have as many units; 0 if they
// are much fewer than `pieces`.
constexpr int aligned_pieces_for(int pieces, int64_t heads) {
    int aligned = pieces;
    while (heads % aligned != 0 && aligned % heads != 0) {
        --aligned;
    }
    return is_nearly_all_of(aligned, pieces) ? aligned : 0;
}

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
        if (plan.unit_keys > 0) {
            length = plan.unit_keys;
            origin = plan.by_unit.div(begin) * length;
            count = end > origin ? plan.by_unit.div(end - origin - 1) + 1 : 0;
        } else if (plan.max_splits > 0) {
            const Fixed fixed = fix(end - begin, count, params.cache.num_splits, length);
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
        int length, count;
    };
    // A fixed number of splits. Not inlined: the divisions take much code, and the function is used often.
    __device__ __noinline__ static Fixed fix(int keys, int units, int num_splits, int unit) {
        const int length = max((units - 1) / num_splits + 1, 1) * unit;
        return {length, static_cast<int>((unsigned(keys) + unsigned(length) - 1) / unsigned(length))};
    }
};

// A unit of one head of one sequence.
struct UnitPlace {
    int bidb, bidh_k, unit;

    // Where the units go on after `run` units of a head that has `count`. heads: SplitkvPlan::heads_with_units.
    __device__ UnitPlace after(int run, int count, int heads) const {
        const int next = unit + run;
        const bool is_head_done = next == count, is_sequence_done = is_head_done && bidh_k + 1 == heads;
        return {bidb + is_sequence_done, is_sequence_done ? 0 : bidh_k + is_head_done, is_head_done ? 0 : next};
    }
};

// The units of all sequences and heads, in the order sequence, head, unit; the host makes sure that 32 bits count them.
// If a piece has all heads of a sequence, they count as one, head 0.
// Every warp computes it for itself, so that no warp waits for another.
class Schedule {
public:
    __device__ Schedule(const Flash_fwd_params &params, const SplitkvPlan &plan)
        : params(params), plan(plan), per_lane((params.b + 31) / 32) {
        const int lane = threadIdx.x % 32;
        int max_units = 0, min_units = INT_MAX;
#pragma unroll 1
        for (int i = 0; i < per_lane; ++i) {
            if (lane * per_lane + i < params.b) {
                const int count = count_of(lane * per_lane + i);
                first_count = i == 0 ? count : first_count;
                of_this_lane += count * plan.heads_with_units(params);
                max_units = max(max_units, count);
                min_units = min(min_units, count);
            }
        }
        int sum = of_this_lane;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(kAllLanes, sum, step);
            sum += lane >= step ? other : 0;
        }
        before = sum - of_this_lane;
        const int total = uniform(__shfl_sync(kAllLanes, sum, 31));
        max_units = __reduce_max_sync(kAllLanes, max_units);
        const bool is_equal = max_units == __reduce_min_sync(kAllLanes, min_units);
        // A piece has `units_of_piece` units or one more; chosen splits have at least two units, so some pieces may be
        // empty.
        const int max_pieces = plan.max_splits > 0 ? total : total / 2;
        if (is_equal && plan.aligned_pieces > 0 && plan.aligned_pieces <= max_pieces) {
            pieces = plan.aligned_pieces;
            pieces_of_group = plan.group_pieces;
            units_of_group = max_units * plan.group_heads;
        } else {
            pieces = pieces_of_group = max(min(plan.pieces, max_pieces), 1);
            units_of_group = total;
        }
        units_of_piece = units_of_group / pieces_of_group;
        longer_pieces = units_of_group - units_of_piece * pieces_of_group;
    }

    struct Piece {
        int first, count;  // units
    };
    __device__ Piece piece(int index) const {
        if (index >= pieces) {
            return {0, 0};
        }
        const int group = index / pieces_of_group, in_group = index - group * pieces_of_group;
        return {group * units_of_group + in_group * units_of_piece + min(in_group, longer_pieces),
                units_of_piece + (in_group < longer_pieces)};
    }
    // The piece that holds a unit.
    __device__ int piece_of(int unit) const {
        const int group = unit / units_of_group, in_group = unit - group * units_of_group;
        const int in_longer = longer_pieces * (units_of_piece + 1);
        return group * pieces_of_group + (in_group < in_longer
                                              ? in_group / (units_of_piece + 1)
                                              : longer_pieces + (in_group - in_longer) / units_of_piece);
    }

    // Called by all lanes.
    __device__ UnitPlace find(int unit) const {
        UnitPlace place{};
        const bool is_here = unit >= before && unit < before + of_this_lane;
        if (is_here) {
            const int heads = plan.heads_with_units(params);
            int bidb = threadIdx.x % 32 * per_lane, left = unit - before, count = first_count;
            // The loop ends even if another stream writes lengths meanwhile.
#pragma unroll 1
            while (left >= count * heads && bidb + 1 < params.b) {
                left -= count * heads;
                count = count_of(++bidb);
            }
            const int head = min(left / count, heads - 1);
            place = {bidb, head, left - head * count};
        }
        const int source = __ffs(__ballot_sync(kAllLanes, is_here)) - 1;
        const auto from_source = [&](int x) { return uniform(__shfl_sync(kAllLanes, x, source)); };
        return {from_source(place.bidb), from_source(place.bidh_k), from_source(place.unit)};
    }

private:
    static constexpr unsigned kAllLanes = 0xffffffffu;
    const Flash_fwd_params &params;
    const SplitkvPlan &plan;
    const int per_lane;            // sequences
    int before, of_this_lane = 0;  // units
    int first_count = 0;           // units of a head of the lane's first sequence
    int pieces;                    // in use
    // Pieces are cut within groups: one head, several heads of one piece, or all heads.
    int pieces_of_group, units_of_group;
    int units_of_piece, longer_pieces;  // longer_pieces: of a group, those with one unit more

    __device__ int count_of(int bidb) const { return Units(params, plan, cache_sequence(params, bidb)).count; }
};

// Walks through the runs of one piece and tells the combine kernel which heads have several.
class Runs {
public:
    int left;      // units
    UnitPlace at;  // of the next run

    // head: of the piece, if plan.by_sequence, else 0. Called by a whole warp; all warps of a CTA may do so.
    __device__ Runs(const Flash_fwd_params &params, const SplitkvPlan &plan, int piece, int head)
        : params(params), plan(plan), schedule(params, plan), piece(piece), head(head) {
        const Schedule::Piece units = schedule.piece(piece);
        first_unit = units.first;
        left = units.count;
        at = left > 0 ? schedule.find(first_unit) : UnitPlace{};
    }

    struct Run {
        int bidb, bidh_k;
        int first_key, end_key;
        int64_t slot;      // of the partial result; -1: the run has all keys of the head
        int units_before;  // of all heads; -1: the head has begun in another piece
        int units_of_head;
    };
    // The next run, which belongs to `sequence`. Needs left > 0.
    __device__ Run next(const Sequence &sequence) {
        const Units units(params, plan, sequence);
        const int count = uniform(units.count);
        // In range, and at least one unit, even if another stream has written lengths meanwhile.
        at.unit = min(at.unit, count - 1);
        const int length = plan.max_splits > 0 ? 1 : max(min(left, count - at.unit), 1);
        const int bidh_k = plan.by_sequence ? head : at.bidh_k;
        const bool begins = at.unit == 0, is_whole = length == count;
        const int64_t slot = plan.max_splits > 0 ? (int64_t(at.bidb) * params.h_k + bidh_k) * plan.max_splits + at.unit
                                                 : int64_t{2 * piece + begins} * plan.heads_of_piece(params) + head;
        const Run run{at.bidb,
                      bidh_k,
                      units.first_key(at.unit),
                      units.first_key(at.unit + length),
                      is_whole ? -1 : slot,
                      begins ? first_unit : -1,
                      count};
        first_unit += length;
        left -= length;
        at = at.after(length, count, plan.heads_with_units(params));
        at.bidb = min(at.bidb, params.b - 1);
        return run;
    }

    // Tells the combine kernel of a run that next() returned. Called for each of them, by one and the same thread,
    // after the kernel before has ended. It divides, so it is best called while loads are on their way.
    __device__ void record(const Run &run) const {
        if (plan.max_splits > 0 || plan.pieces == 1) {
            return;  // the combine kernel needs no SharedHead, or does not run
        }
        const bool is_shared = run.units_before >= 0 && run.slot >= 0;
        SharedHead shared{};
        if (is_shared) {
            const int last_piece = min(schedule.piece_of(run.units_before + run.units_of_head - 1), plan.pieces - 1);
            shared = {run.bidb, run.bidh_k, piece, last_piece - piece + 1};
        }
        if (plan.combines_by_cta(params)) {
            write(int64_t{piece} * plan.heads_of_piece(params) + head, shared);
        } else if (run.units_before >= 0) {
            write(int64_t{run.bidb} * params.h_k + run.bidh_k, shared);
        }
    }
    // The same for a piece without units.
    __device__ void record_nothing() const {
        if (plan.combines_by_cta(params) && plan.pieces > 1) {
            write(int64_t{piece} * plan.heads_of_piece(params) + head, {});
        }
    }

private:
    const Flash_fwd_params &params;
    const SplitkvPlan &plan;
    const Schedule schedule;
    const int piece, head;
    int first_unit;  // of the next run

    __device__ void write(int64_t index, const SharedHead &shared) const {
        reinterpret_cast<SharedHead *>(params.cache.scratch)[index] = shared;
    }
};

}  // namespace flash::kvcache
