// The work tiles of the backward. One grid has three phases for each head: preprocess, compute, convert. A CTA has one
// work tile. The phases of a head follow each other at a distance, beside other phases of other heads: memory works for
// one head while the tensor cores work for another, and what one phase leaves for the next is still in L2.
//
// Where two warps of a CTA have nothing to do in compute, they do preprocess and convert of other heads (RowWarps).
// Then only the first and the last heads have work tiles of these phases.
#pragma once

#include <cutlass/fast_math.h>

#include "../common/sequence.h"

namespace flash::sm90 {

constexpr int kRowsOfWorkTile = 512;                         // query rows of a work tile of preprocess or convert
constexpr int kRowsOfUnit = Flash_bwd_params::kRowsPerFlag;  // of the row work that comes with a work tile of compute

enum class Phase : int {
    preprocess,  // delta, the padded log-sum-exp, zeros in the accumulator of dQ
    compute,     // dK and dV of a key block; adds to dQ
    convert,     // the accumulator becomes dQ
};

struct WorkTile {
    Phase phase;
    int head;   // of dK and dV; equal lengths: of all sequences
    int index;  // key block, or block of kRowsOfWorkTile padded query rows of the head
};

// Row work that comes with a work tile of compute: units of kRowsOfUnit padded query rows of a head.
struct RowUnits {
    int head, begin, end;
};

// The order of all work tiles. Heads come in groups. First come the work tiles of preprocess of group 0. Then, for each
// group i: those of compute of group i, and spread among them those of preprocess of group i + 1 and of convert of
// group i - lag. Last come those of convert of the last groups. With row work beside compute, nothing is spread: work
// tiles of compute of a head have the row work of the heads one group on and one group back, if there are such heads.
//
// A work tile waits for work tiles with smaller numbers alone (WorkCounts).
class WorkOrder {
    using Divisor = cutlass::FastDivmod;
    int heads_, group, groups, lag;
    int preprocess_, convert;             // work tiles of a head
    bool is_interleaved;                  // compute: the first key block of each head of the group, then the second
    bool is_beside;                       // row work comes with compute
    int units_;                           // of row work of a head
    int preparing;                        // is_beside: the work tiles of compute that have row work of preprocess
    int units_prepared, units_converted;  // is_beside: that come with a work tile
    // Of a group for which neither the first nor the last heads are near: work tiles of compute, of the other phases,
    // and the distance at which the fewer are spread among the more.
    int usual_computed, usual_others;
    Divisor by_usual_count, by_usual_stride, by_group, by_rows, by_key_blocks, by_heads;

public:
    int compute;  // work tiles of a head

    // On the host. is_local: the work tiles of a head are of different length. is_beside: row work comes with compute.
    WorkOrder(const Flash_bwd_params &params, const RowBlocks &key_blocks, bool is_local, bool is_beside)
        : heads_(key_blocks.all_heads()),
          group(params.interleaved_heads),
          groups((heads_ + group - 1) / group),
          lag(is_beside || (params.dq_semaphore == nullptr && is_local) ? 1 : 2),
          preprocess_(row_tiles_of(params)),
          convert(params.dq_accum == nullptr ? 0 : preprocess_),
          is_interleaved(is_local || params.dq_semaphore != nullptr),
          is_beside(is_beside),
          units_(static_cast<int>(params.padded_head_stride * params.heads_per_dkv / kRowsOfUnit)),
          // The first half of a head's work tiles: they start well before those that wait for preprocess.
          preparing((key_blocks.per_head + 1) / 2),
          units_prepared(ceil_div(units_, preparing)),
          units_converted(params.dq_accum == nullptr ? 0 : ceil_div(units_, key_blocks.per_head)),
          usual_computed(key_blocks.per_head * group),
          usual_others(is_beside ? 0 : (preprocess_ + convert) * group),
          by_usual_count(usual_computed + usual_others),
          by_usual_stride(stride_of(usual_computed, usual_others)),
          by_group(group),
          by_rows(preprocess_),
          by_key_blocks(key_blocks.per_head > 0 ? key_blocks.per_head : 1),
          by_heads(params.cu_seqlens_q == nullptr ? key_blocks.heads : heads_),
          compute(key_blocks.per_head) {}

    // Work tiles of a call. The class is for calls in which they fit into an int.
    static int64_t count(const Flash_bwd_params &params, const RowBlocks &key_blocks, bool is_beside) {
        const int64_t of_rows = int64_t{row_tiles_of(params)} * (params.dq_accum == nullptr ? 1 : 2);
        const int heads = key_blocks.all_heads();
        const int of_own = is_beside && params.interleaved_heads < heads ? params.interleaved_heads : heads;
        return of_rows * of_own + int64_t{key_blocks.per_head} * heads;
    }

    FLASH_HOST_DEVICE int heads() const { return heads_; }
    FLASH_HOST_DEVICE int row_tiles() const { return preprocess_; }  // of a head, where it has work tiles of preprocess
    FLASH_HOST_DEVICE int units() const { return units_; }

    // Row work of a work tile of compute. Preprocess of a head one group on, which no work tile of its own has; convert
    // of a head one group back.
    FLASH_HOST_DEVICE RowUnits prepared_beside(const WorkTile &tile) const {
        const int head = tile.head + group;
        return is_beside && head < heads_ && tile.index < preparing ? units(head, tile.index, units_prepared)
                                                                    : RowUnits{};
    }
    FLASH_HOST_DEVICE RowUnits converted_beside(const WorkTile &tile) const {
        const int head = tile.head - group;
        return is_beside && head >= 0 ? units(head, tile.index, units_converted) : RowUnits{};
    }

    // The place of a head of WorkTile: batch index (variable lengths: 0) and head of dK and dV.
    FLASH_HOST_DEVICE void by_sequence(int &bidb, int &bidh_dkv, int head) const { by_heads(bidb, bidh_dkv, head); }

    // number: of a CTA.
    FLASH_HOST_DEVICE WorkTile at(int number) const {
        if (number < begin(0)) {
            return of_rows(Phase::preprocess, number);
        }
        int i = by_usual_count.div(number - begin(0));
        i = i < groups ? i : groups;
        while (i < groups && begin(i + 1) <= number) {  // fewer work tiles of convert come with the first groups
            ++i;
        }
        int position = number - begin(i);
        if (i == groups) {
            const int of_others =
                is_beside ? heads_ - group : heads_before(i - lag);  // heads that are converted before
            return of_rows(Phase::convert, convert * (of_others > 0 ? of_others : 0) + position);
        }
        const int first_converted = convert * converted_before(i);
        const int first_head = heads_before(i), heads_here = heads_before(i + 1) - first_head;
        const int first_prepared = preprocess_ * prepared_before(i);
        const int prepared = preprocess_ * prepared_before(i + 1) - first_prepared;
        const int converted = convert * converted_before(i + 1) - first_converted;
        const int computed = compute * heads_here, others = prepared + converted;
        int round, in_round, stride;
        if (computed == usual_computed && others == usual_others) {
            stride = by_usual_stride.divisor;
            by_usual_stride(round, in_round, position);
        } else {
            stride = stride_of(computed, others);
            round = position / stride;
            in_round = position - round * stride;
        }
        const int fewer = others < computed ? others : computed;
        const bool is_fewer = round < fewer && in_round == stride - 1;
        const int of_fewer = round < fewer ? round : fewer;
        position = is_fewer ? of_fewer : position - of_fewer;
        if (is_fewer == (others < computed)) {
            return position < prepared ? of_rows(Phase::preprocess, first_prepared + position)
                                       : of_rows(Phase::convert, first_converted + position - prepared);
        }
        int head, block;
        if (!is_interleaved) {
            by_key_blocks(head, block, position);
        } else if (heads_here == group) {
            by_group(block, head, position);
        } else {
            block = position / heads_here;
            head = position - block * heads_here;
        }
        return {Phase::compute, first_head + head, block};
    }

private:
    static int row_tiles_of(const Flash_bwd_params &params) {
        return static_cast<int>((params.padded_head_stride * params.heads_per_dkv + kRowsOfWorkTile - 1) /
                                kRowsOfWorkTile);
    }
    FLASH_HOST_DEVICE static int stride_of(int computed, int others) {
        const int fewer = others < computed ? others : computed;
        return fewer == 0 ? computed + others + 1 : (computed + others) / fewer;
    }
    // Heads of the groups before group i.
    FLASH_HOST_DEVICE int heads_before(int i) const { return i <= 0 ? 0 : i < groups ? i * group : heads_; }
    // Heads whose work tiles of preprocess or convert come before group i.
    FLASH_HOST_DEVICE int prepared_before(int i) const { return heads_before(is_beside ? 1 : i + 1); }
    FLASH_HOST_DEVICE int converted_before(int i) const { return is_beside ? 0 : heads_before(i - lag); }
    // The number of the first work tile that comes with group i.
    FLASH_HOST_DEVICE int begin(int i) const {
        return preprocess_ * prepared_before(i) + compute * heads_before(i) + convert * converted_before(i);
    }
    // Part `index` of a head's units.
    FLASH_HOST_DEVICE RowUnits units(int head, int index, int part) const {
        const int begin = index * part, end = begin + part;
        return {head, begin, end < units_ ? end : units_};
    }
    static int ceil_div(int x, int y) { return y == 0 ? 0 : (x + y - 1) / y; }
    FLASH_HOST_DEVICE WorkTile of_rows(Phase phase, int number) const {
        WorkTile tile{phase, 0, 0};
        by_rows(tile.head, tile.index, number);
        return tile;
    }
};

}  // namespace flash::sm90
