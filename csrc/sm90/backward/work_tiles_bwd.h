// The work tiles of the backward. One grid has three phases for each head: preprocess, compute, convert. A CTA has one
// work tile. The phases of a head follow each other at a distance and overlap other phases of other heads: memory works
// for one head while the tensor cores work for another, and the results of one phase are still in L2 for the next.
#pragma once

#include <cutlass/fast_math.h>

#include "common/sequence.h"

namespace flash::sm90 {

enum class Phase : int {
    preprocess,  // delta, the padded log-sum-exp, zeros in the accumulator of dQ
    compute,     // dK and dV of some key blocks; adds to dQ
    convert,     // the accumulator becomes dQ
};

struct WorkTile {
    Phase phase;
    int head;            // of dK and dV; equal lengths: of all sequences
    int index;           // group of key blocks, or row tile: a block of padded query rows of the head
    bool is_one = true;  // phase compute: the group has one key block
};

// The key blocks of a head in groups, one for each work tile. Every other key block of a group counts from the end.
// Under a causal mask with as many queries as keys, pairs then have the same number of steps, except the middle of an
// odd number of key blocks.
struct KeyBlockGroups {
    int size;   // key blocks of a group
    int count;  // groups

    FLASH_HOST_DEVICE KeyBlockGroups(int key_blocks, int size) : size(size), count((key_blocks + size - 1) / size) {}

    // Key block i of a group. It may lie past the last one.
    FLASH_HOST_DEVICE int at(int group, int i) const {
        return i % 2 == 0 ? i * count + group : (i + 1) * count - 1 - group;
    }
};

// The order of all work tiles. Heads come in groups. First come the work tiles of preprocess of group 0. Then, for each
// group i: those of compute of group i, and spread among them those of preprocess of group i + 1 and of convert of
// group i - kLag. Last come those of convert of the last groups.
//
// A work tile waits only for work tiles with smaller numbers (WorkCounts).
//
// Where key blocks come in groups, the last heads have groups of one. Work tiles of phase compute then are shorter at
// the end, and fewer SMs are idle while the last ones run.
class WorkOrder {
    using Divisor = cutlass::FastDivmod;
    static constexpr int kLag = 2;  // in groups
    int heads_, group, groups;      // group: heads of a group
    int preprocess_, convert;       // work tiles of a head
    int ctas;                       // that run at the same time
    bool is_interleaved;            // compute: the first work tile of each head of the group, then the second
    // Steady state: how many groups are neither among the first nor among the last, for each of them the work tiles of
    // compute and of the other phases, and the number of their first work tile. by_steady_stride: the distance at which
    // the fewer are spread among the more.
    int steady_groups, steady_compute, steady_others, first_steady;
    Divisor by_steady_count, by_steady_stride, by_heads_of_group, by_rows, by_key_block_groups, by_heads;

public:
    KeyBlockGroups key_block_groups;  // of a head: the work tiles of compute, but for the last heads

private:
    int key_blocks, first_ungrouped;  // of a head; the first one with a work tile for each key block

public:
    // Runs on the host. rows_per_tile: query rows of a row tile. is_local: the work tiles of a head are of different
    // length. group_size: key blocks of a work tile. ctas: that run at the same time.
    WorkOrder(const Flash_bwd_params &params, const RowBlocks &key_blocks, int rows_per_tile, bool is_local,
              int group_size, int ctas)
        : heads_(key_blocks.all_heads()),
          group(params.interleaved_heads),
          groups((heads_ + group - 1) / group),
          preprocess_(row_tiles(params, rows_per_tile)),
          convert(params.dq_accum == nullptr ? 0 : preprocess_),
          ctas(ctas),
          is_interleaved(is_local || params.dq_semaphore != nullptr),
          steady_groups(groups - 2 - kLag > 0 ? groups - 2 - kLag : 0),
          steady_compute(KeyBlockGroups(key_blocks.per_head, group_size).count * group),
          steady_others((preprocess_ + convert) * group),
          by_steady_count(steady_compute + steady_others),
          by_steady_stride(stride_of(steady_compute, steady_others)),
          by_heads_of_group(group),
          by_rows(preprocess_),
          by_key_block_groups(key_blocks.per_head > 0 ? KeyBlockGroups(key_blocks.per_head, group_size).count : 1),
          by_heads(params.cu_seqlens_q == nullptr ? key_blocks.heads : heads_),
          key_block_groups(key_blocks.per_head, group_size),
          key_blocks(key_blocks.per_head),
          first_ungrouped(heads_ - ungrouped_heads(params, key_blocks, group_size, ctas)) {
        first_steady = begin<true>(kLag);
    }

    // Work tiles of a call. The class is for calls in which they fit into an int.
    static int64_t count(const Flash_bwd_params &params, const RowBlocks &key_blocks, int rows_per_tile, int group_size,
                         int ctas) {
        const int64_t of_rows = int64_t{row_tiles(params, rows_per_tile)} * (params.dq_accum == nullptr ? 1 : 2);
        const int grouped = KeyBlockGroups(key_blocks.per_head, group_size).count;
        return (of_rows + grouped) * key_blocks.all_heads() +
               int64_t{key_blocks.per_head - grouped} * ungrouped_heads(params, key_blocks, group_size, ctas);
    }

    FLASH_HOST_DEVICE int heads() const { return heads_; }
    FLASH_HOST_DEVICE int preprocess() const { return preprocess_; }          // work tiles of a head
    FLASH_HOST_DEVICE int compute() const { return key_block_groups.count; }  // of the first heads
    FLASH_HOST_DEVICE int compute_of(int head) const { return head < first_ungrouped ? compute() : key_blocks; }

    // Whether the head is one of the last. They have at least one work tile of phase compute for each of the CTAs that
    // run at the same time, if there are so many.
    FLASH_HOST_DEVICE bool is_one_of_last(int head) const { return (heads_ - 1 - head) * compute() < ctas; }

    // The place of a head of WorkTile: batch index (variable lengths: 0) and head of dK and dV.
    FLASH_HOST_DEVICE void by_sequence(int &bidb, int &bidh_dkv, int head) const { by_heads(bidb, bidh_dkv, head); }

    // number: of a CTA. Every CTA begins with this, so the steady state takes few operations. They run in ordinary
    // registers, because uniform ones have a longer latency. kMayGroup: whether a group may have several key blocks.
    template <bool kMayGroup>
    FLASH_HOST_DEVICE WorkTile at(int number) const {
        const int after_first = number - first_steady;
        if (after_first >= 0 && after_first < steady_groups * (steady_compute + steady_others)) {
            int i, position, round, in_round;
            by_steady_count(i, position, after_first);
            by_steady_stride(round, in_round, position);
            const Part part =
                part_of(position, round, in_round, by_steady_stride.divisor, steady_compute, steady_others);
            i += kLag;
            if (part.is_compute) {
                int head, block;
                if (is_interleaved) {
                    by_heads_of_group(block, head, part.position);
                } else {
                    by_key_block_groups(head, block, part.position);
                }
                return {Phase::compute, i * group + head, block, key_block_groups.size == 1};
            }
            const int prepared = preprocess_ * group;
            return part.position < prepared
                       ? of_rows(Phase::preprocess, (i + 1) * prepared + part.position)
                       : of_rows(Phase::convert, (i - kLag) * convert * group + part.position - prepared);
        }
        return at_beginning_or_end<kMayGroup>(number);
    }

private:
    // At the beginning, fewer work tiles of convert come with a group; at the end, fewer of preprocess.
    template <bool kMayGroup>
    FLASH_HOST_DEVICE WorkTile at_beginning_or_end(int number) const {
        if (number < begin<kMayGroup>(0)) {
            return of_rows(Phase::preprocess, number);
        }
        int i = by_steady_count.div(number - begin<kMayGroup>(0));
        i = i < groups ? i : groups;
        while (kMayGroup && begin<kMayGroup>(i) > number) {  // the last groups have more work tiles
            --i;
        }
        while (i < groups && begin<kMayGroup>(i + 1) <= number) {
            ++i;
        }
        const int position = number - begin<kMayGroup>(i);
        const int first_converted = convert * heads_before(i - kLag);
        if (i == groups) {
            return of_rows(Phase::convert, first_converted + position);
        }
        const int first_head = heads_before(i), heads_here = heads_before(i + 1) - first_head;
        const int first_prepared = preprocess_ * heads_before(i + 1);
        const int prepared = preprocess_ * heads_before(i + 2) - first_prepared;
        const int converted = convert * heads_before(i + 1 - kLag) - first_converted;
        const int of_head = kMayGroup ? compute_of(first_head) : compute(), computed = of_head * heads_here,
                  others = prepared + converted;
        const int stride = stride_of(computed, others), round = position / stride;
        const Part part = part_of(position, round, position - round * stride, stride, computed, others);
        if (part.is_compute) {
            const int by = is_interleaved ? heads_here : of_head, quotient = part.position / by,
                      rest = part.position - quotient * by;
            const bool is_one = !kMayGroup || key_block_groups.size == 1 || first_head >= first_ungrouped;
            return is_interleaved ? WorkTile{Phase::compute, first_head + rest, quotient, is_one}
                                  : WorkTile{Phase::compute, first_head + quotient, rest, is_one};
        }
        return part.position < prepared ? of_rows(Phase::preprocess, first_prepared + part.position)
                                        : of_rows(Phase::convert, first_converted + part.position - prepared);
    }

    // The work tiles of a group come in rounds of `stride`. The last one of a round is of the kind that has fewer: of
    // compute, or of the other phases. Part: the kind of a work tile, and its position among those of its kind.
    struct Part {
        bool is_compute;
        int position;
    };
    FLASH_HOST_DEVICE static Part part_of(int position, int round, int in_round, int stride, int computed, int others) {
        const int fewer = others < computed ? others : computed, of_fewer = round < fewer ? round : fewer;
        const bool is_fewer = round < fewer && in_round == stride - 1;
        return {is_fewer != (others < computed), is_fewer ? of_fewer : position - of_fewer};
    }
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
    template <bool kMayGroup>
    FLASH_HOST_DEVICE int begin(int i) const {
        const int grouped =
            preprocess_ * heads_before(i + 1) + compute() * heads_before(i) + convert * heads_before(i - kLag);
        const int ungrouped = heads_before(i) - first_ungrouped;
        return kMayGroup && ungrouped > 0 ? grouped + (key_blocks - compute()) * ungrouped : grouped;
    }
    // The heads of the last group of heads, or of the last two if its groups of key blocks are fewer than the CTAs.
    // None of them is in the steady state.
    static int ungrouped_heads(const Flash_bwd_params &params, const RowBlocks &key_blocks, int group_size, int ctas) {
        const int heads = key_blocks.all_heads(), group = params.interleaved_heads;
        const int groups = (heads + group - 1) / group;
        if (group_size == 1 || groups <= 1) {
            return 0;
        }
        const int of_last = heads - (groups - 1) * group;
        const bool is_enough = of_last * KeyBlockGroups(key_blocks.per_head, group_size).count >= ctas || groups == 2;
        return is_enough ? of_last : of_last + group;
    }
    FLASH_HOST_DEVICE WorkTile of_rows(Phase phase, int number) const {
        WorkTile tile{phase, 0, 0};
        by_rows(tile.head, tile.index, number);
        return tile;
    }
};

}  // namespace flash::sm90
