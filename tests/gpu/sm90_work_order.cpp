// The order of the work tiles of the sm90 backward, for random calls: every work tile has one number, and comes after
// those that it waits for; every key block is in one group. Prints what is wrong and ends with 1. Argument: a seed.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "sm90/backward/work_tiles_bwd.h"

using namespace flash;
using flash::sm90::KeyBlockGroups;
using flash::sm90::Phase;
using flash::sm90::WorkOrder;
using flash::sm90::WorkTile;

namespace {

const char *fault(const WorkOrder &order, int count, int key_blocks, bool has_convert) {
    const auto limit = [&](int phase, int head) {
        return phase == 1 ? order.compute_of(head) : phase == 0 || has_convert ? order.preprocess() : 0;
    };
    std::vector<int> done[3];
    for (auto &of_phase : done) {
        of_phase.assign(order.heads(), 0);
    }
    std::set<std::tuple<int, int, int>> seen;
    std::set<std::pair<int, int>> blocks;  // of heads
    for (int number = 0; number < count; ++number) {
        const WorkTile tile = order.key_block_groups.size == 1 && number % 2 == 0 ? order.at<false>(number)
                                                                                   : order.at<true>(number);
        const int phase = static_cast<int>(tile.phase);
        if (tile.head < 0 || tile.head >= order.heads() || tile.index < 0 || tile.index >= limit(phase, tile.head)) {
            return "a work tile that does not exist";
        }
        if (!seen.insert({phase, tile.head, tile.index}).second) {
            return "a work tile has two numbers";
        }
        if (phase > 0 && done[phase - 1][tile.head] < limit(phase - 1, tile.head)) {
            return "a work tile comes before one that it waits for";
        }
        for (int i = 0; phase == 1 && i < (tile.is_one ? 1 : order.key_block_groups.size); ++i) {
            const int block = order.key_block_groups.at(tile.index, i);
            if (block < 0 || (block < key_blocks && !blocks.insert({tile.head, block}).second)) {
                return "a key block in two work tiles";
            }
        }
        ++done[phase][tile.head];
    }
    for (int head = 0; head < order.heads(); ++head) {
        if (done[2][head] != limit(2, head)) {
            return "a row tile that is not converted";
        }
    }
    if (static_cast<int>(blocks.size()) != order.heads() * key_blocks) {
        return "a key block without a work tile";
    }
    return nullptr;  // as many different ones as there are
}

// The heads at the end have a work tile of phase compute for each of `ctas`, and are no more than needed.
bool last_heads_fill_gpu(const WorkOrder &order, int ctas) {
    int last = 0;
    for (int head = 0; head < order.heads(); ++head) {
        last += order.is_one_of_last(head);
    }
    const bool is_end = last > 0 && order.is_one_of_last(order.heads() - 1);
    return is_end && (last == order.heads() || last * order.compute() >= ctas) && (last - 1) * order.compute() < ctas;
}

// Every key block is in one group.
bool covers_all(const KeyBlockGroups &groups, int key_blocks) {
    std::vector<int> seen(key_blocks);
    for (int group = 0; group < groups.count; ++group) {
        for (int i = 0; i < groups.size; ++i) {
            const int block = groups.at(group, i);
            if (block < 0 || (block < key_blocks && ++seen[block] > 1)) {
                return false;
            }
        }
    }
    return std::count(seen.begin(), seen.end(), 1) == key_blocks;
}

}  // namespace

int main(int, char **arguments) {
    std::mt19937 random(std::strtoul(arguments[1], nullptr, 10));
    const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
    float accumulator;
    int semaphore;
    for (int call = 0; call < 5000; ++call) {
        Flash_bwd_params params;
        params.b = draw(1, 5);
        params.heads_per_dkv = draw(1, 5);
        params.h = draw(1, 12) * params.heads_per_dkv;
        params.seqlen_q = draw(1, 3000);
        params.seqlen_k = draw(1, 3000);
        constexpr int kRows = Flash_bwd_params::kRowsRounded;
        params.padded_head_stride = (params.seqlen_q + kRows - 1) / kRows * kRows;
        params.dq_accum = draw(0, 3) == 0 ? nullptr : &accumulator;
        params.dq_semaphore = draw(0, 1) == 0 ? nullptr : &semaphore;
        const int heads = params.h / params.heads_per_dkv;
        params.interleaved_heads = draw(1, params.b * heads);
        const bool is_packed = draw(0, 1) == 0;
        int unread = 0;
        params.total_q = int64_t{params.b} * params.seqlen_q;
        if (is_packed) {
            params.cu_seqlens_q = &unread;
            params.padded_head_stride = (params.total_q / kRows + params.b) * kRows;
            params.interleaved_heads = draw(1, heads);
        }
        const RowBlocks blocks(params.cu_seqlens_q, int64_t{params.b} * params.seqlen_k, params.seqlen_k, params.b,
                               heads, draw(0, 1) == 0 ? 64 : 128);
        const int rows_per_tile = kRows << draw(0, 3);
        const int group_size = draw(1, 4), ctas = draw(1, 150);
        const WorkOrder order(params, blocks, rows_per_tile, /*is_local=*/draw(0, 1) == 0, group_size, ctas);
        if (!covers_all(order.key_block_groups, blocks.per_head)) {
            std::printf("%d key blocks in groups of %d\n", blocks.per_head, group_size);
            return 1;
        }
        if (!last_heads_fill_gpu(order, ctas)) {
            std::printf("%d heads with %d work tiles: wrong last heads\n", order.heads(), order.compute());
            return 1;
        }
        const int count = static_cast<int>(WorkOrder::count(params, blocks, rows_per_tile, group_size, ctas));
        if (const char *what = fault(order, count, blocks.per_head, params.dq_accum != nullptr)) {
            std::printf("%s: b=%d h=%d heads_per_dkv=%d seqlen_q=%d seqlen_k=%d group=%d rows_per_tile=%d\n", what,
                        params.b, params.h, params.heads_per_dkv, params.seqlen_q, params.seqlen_k,
                        params.interleaved_heads, rows_per_tile);
            return 1;
        }
    }
}
