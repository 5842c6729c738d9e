// The work tiles of the backward. One grid has three phases for each head: preprocess, compute, convert. A CTA has one
// work tile. The phases of a head follow each other at a distance, beside other phases of other heads: memory works for
// one head while the tensor cores work for another, and what one phase leaves for the next is still in L2.
#pragma once

#include "../common/sequence.h"

namespace flash::sm90 {

constexpr int kRowsOfWorkTile = 512;  // query rows of a work tile of preprocess or convert

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

// The order of all work tiles. Heads come in groups. First come the work tiles of preprocess of group 0. Then, for each
// group i: those of compute of group i, and spread among them those of preprocess of group i + 1 and of convert of
// group i - lag. Last come those of convert of the last groups.
//
// A work tile waits for work tiles with smaller numbers alone (WorkCounts), and CTAs start in the order of their
// numbers, so that none waits for a CTA that cannot start (deadlock).
struct WorkOrder {
    int heads, group, lag;
    int preprocess, compute, convert;  // work tiles of a head
    bool is_interleaved;               // compute: the first key block of each head of the group, then the second

    // is_local: the work tiles of a head are of different length.
    FLASH_HOST_DEVICE WorkOrder(const Flash_bwd_params &params, const RowBlocks &key_blocks, bool is_local)
        : heads(key_blocks.all_heads()),
          group(params.interleaved_heads),
          lag(params.dq_semaphore == nullptr && is_local ? 1 : 2),
          preprocess(static_cast<int>((params.padded_head_stride * params.heads_per_dkv + kRowsOfWorkTile - 1) /
                                      kRowsOfWorkTile)),
          compute(key_blocks.per_head),
          convert(params.dq_accum == nullptr ? 0 : preprocess),
          is_interleaved(is_local || params.dq_semaphore != nullptr) {}

    FLASH_HOST_DEVICE int64_t count() const { return (int64_t{preprocess} + compute + convert) * heads; }

    // number: below count(), which fits into an int.
    FLASH_HOST_DEVICE WorkTile at(int number) const {
        const int groups = (heads + group - 1) / group;
        if (number < begin(0)) {
            return flat(Phase::preprocess, number);
        }
        int i = clamp_to((number - begin(0)) / ((preprocess + compute + convert) * group), 0, groups);
        while (i < groups && begin(i + 1) <= number) {  // fewer work tiles of convert come with the first groups
            ++i;
        }
        const int position = number - begin(i);
        const int first_converted = convert * groups_before(i - lag);
        if (i == groups) {
            return flat(Phase::convert, first_converted + position);
        }
        const int first_prepared = preprocess * groups_before(i + 1);
        const int prepared = preprocess * groups_before(i + 2) - first_prepared;
        const int converted = convert * groups_before(i + 1 - lag) - first_converted;
        const int computed = compute * (groups_before(i + 1) - groups_before(i)), others = prepared + converted;
        // The fewer are spread evenly among the more.
        const int fewer = others < computed ? others : computed;
        const int stride = fewer == 0 ? computed + others + 1 : (computed + others) / fewer;
        const int round = position / stride;
        const bool is_fewer = round < fewer && position % stride == stride - 1;
        const int of_fewer = round < fewer ? round : fewer;
        const int of_kind = is_fewer ? of_fewer : position - of_fewer;
        if (is_fewer == (others < computed)) {
            return of_kind < prepared ? flat(Phase::preprocess, first_prepared + of_kind)
                                      : flat(Phase::convert, first_converted + of_kind - prepared);
        }
        const int heads_here = groups_before(i + 1) - groups_before(i), first_head = groups_before(i);
        return is_interleaved ? WorkTile{Phase::compute, first_head + of_kind % heads_here, of_kind / heads_here}
                              : WorkTile{Phase::compute, first_head + of_kind / compute, of_kind % compute};
    }

private:
    // Heads of the groups before group i.
    FLASH_HOST_DEVICE int groups_before(int i) const {
        return i <= 0 ? 0 : int64_t{i} * group < heads ? i * group : heads;
    }
    // The number of the first work tile that comes with group i.
    FLASH_HOST_DEVICE int begin(int i) const {
        return preprocess * groups_before(i + 1) + compute * groups_before(i) + convert * groups_before(i - lag);
    }
    FLASH_HOST_DEVICE WorkTile flat(Phase phase, int index) const {
        const int per_head = phase == Phase::preprocess ? preprocess : convert;
        return {phase, index / per_head, index % per_head};
    }
};

}  // namespace flash::sm90
