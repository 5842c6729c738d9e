// The work tiles of the backward. One grid has three phases for each head: preprocess, compute, convert. A CTA has one
// work tile. The phases of a head follow each other at a distance and overlap other phases of other heads: memory works
// for one head while the tensor cores work for another, and the results of one phase are still in L2 for the next.
#pragma once

#include <cutlass/fast_math.h>

#include "common/sequence.h"

namespace flash::sm90 {

enum class Phase : int {
    preprocess,  // delta, the padded log-sum-exp, zeros in the accumulator of dQ
    compute,     // dK and dV of a key block; adds to dQ
    convert,     // the accumulator becomes dQ
};

struct WorkTile {
    Phase phase;
    int head;   // of dK and dV; equal lengths: of all sequences
    int index;  // key block, or row tile: a block of padded query rows of the head
};

// The order of all work tiles. Heads come in groups. First come the work tiles of preprocess of group 0. Then, for each
// group i: those of compute of group i, and spread among them those of preprocess of group i + 1 and of convert of
// group i - kLag. Last come those of convert of the last groups.
//
// A work tile waits only for work tiles with smaller numbers (WorkCounts).
class WorkOrder {
    using Divisor = cutlass::FastDivmod;
    static constexpr int kLag = 2;  // in groups
    int heads_, group, groups;
    int preprocess_, convert;  // work tiles of a head
    bool is_interleaved;       // compute: the first key block of each head of the group, then the second
    // Steady state: a group that is neither among the first nor among the last. Its work tiles of compute, those of the
    // other phases, and the distance at which the fewer are spread among the more.
    int steady_compute, steady_others;
    Divisor by_steady_count, by_steady_stride, by_group, by_rows, by_key_blocks, by_heads;

public:
    int compute;  // work tiles of a head

    // Runs on the host. rows_per_tile: query rows of a row tile. is_local: the work tiles of a head are of different
    // length.
    WorkOrder(const Flash_bwd_params &params, const RowBlocks &key_blocks, int rows_per_tile, bool is_local)
        : heads_(key_blocks.all_heads()),
          group(params.interleaved_heads),
          groups((heads_ + group - 1) / group),
          preprocess_(row_tiles(params, rows_per_tile)),
          convert(params.dq_accum == nullptr ? 0 : preprocess_),
          is_interleaved(is_local || params.dq_semaphore != nullptr),
          steady_compute(key_blocks.per_head * group),
          steady_others((preprocess_ + convert) * group),
          by_steady_count(steady_compute + steady_others),
          by_steady_stride(stride_of(steady_compute, steady_others)),
          by_group(group),
          by_rows(preprocess_),
          by_key_blocks(key_blocks.per_head > 0 ? key_blocks.per_head : 1),
          by_heads(params.cu_seqlens_q == nullptr ? key_blocks.heads : heads_),
          compute(key_blocks.per_head) {}

    // Work tiles of a call. The class is for calls in which they fit into an int.
    static int64_t count(const Flash_bwd_params &params, const RowBlocks &key_blocks, int rows_per_tile) {
        const int64_t of_rows = int64_t{row_tiles(params, rows_per_tile)} * (params.dq_accum == nullptr ? 1 : 2);
        return (of_rows + key_blocks.per_head) * key_blocks.all_heads();
    }

    FLASH_HOST_DEVICE int heads() const { return heads_; }
    FLASH_HOST_DEVICE int preprocess() const { return preprocess_; }  // work tiles of a head

    // The place of a head of WorkTile: batch index (variable lengths: 0) and head of dK and dV.
    FLASH_HOST_DEVICE void by_sequence(int &bidb, int &bidh_dkv, int head) const { by_heads(bidb, bidh_dkv, head); }

    // number: of a CTA.
    FLASH_HOST_DEVICE WorkTile at(int number) const {
        if (number < begin(0)) {
            return of_rows(Phase::preprocess, number);
        }
        int i = by_steady_count.div(number - begin(0));
        i = i < groups ? i : groups;
        while (i < groups && begin(i + 1) <= number) {  // fewer work tiles of convert come with the first groups
            ++i;
        }
        int position = number - begin(i);
        const int first_converted = convert * heads_before(i - kLag);
        if (i == groups) {
            return of_rows(Phase::convert, first_converted + position);
        }
        const int first_head = heads_before(i), heads_here = heads_before(i + 1) - first_head;
        const int first_prepared = preprocess_ * heads_before(i + 1);
        const int prepared = preprocess_ * heads_before(i + 2) - first_prepared;
        const int converted = convert * heads_before(i + 1 - kLag) - first_converted;
        const int computed = compute * heads_here, others = prepared + converted;
        int round, in_round, stride;
        if (computed == steady_compute && others == steady_others) {
            stride = by_steady_stride.divisor;
            by_steady_stride(round, in_round, position);
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
    static int row_tiles(const Flash_bwd_params &params, int rows_per_tile) {
        return static_cast<int>((params.padded_head_stride * params.heads_per_dkv + rows_per_tile - 1) / rows_per_tile);
    }
    FLASH_HOST_DEVICE static int stride_of(int computed, int others) {
        const int fewer = others < computed ? others : computed;
        return fewer == 0 ? computed + others + 1 : (computed + others) / fewer;
    }
    // Heads of the groups before group i.
    FLASH_HOST_DEVICE int heads_before(int i) const { return i <= 0 ? 0 : i < groups ? i * group : heads_; }
    // The number of the first work tile that comes with group i.
    FLASH_HOST_DEVICE int begin(int i) const {
        return preprocess_ * heads_before(i + 1) + compute * heads_before(i) + convert * heads_before(i - kLag);
    }
    FLASH_HOST_DEVICE WorkTile of_rows(Phase phase, int number) const {
        WorkTile tile{phase, 0, 0};
        by_rows(tile.head, tile.index, number);
        return tile;
    }
};

}  // namespace flash::sm90
