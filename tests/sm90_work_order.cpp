// The order of the work of the sm90 backward, for random calls: all work is done once, and after the work that it waits
// for. Prints what is wrong and ends with 1. Argument: a seed.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "sm90/work_tiles_bwd.h"

using namespace flash;
using flash::sm90::Phase;
using flash::sm90::RowUnits;
using flash::sm90::WorkOrder;
using flash::sm90::WorkTile;

namespace {

// Row work, counted in units of kRowsOfUnit rows: each unit of each head once, by a work tile of its own or beside one of
// compute.
class Done {
    std::vector<std::vector<int>> units;

public:
    Done(int heads, int units_of_head) : units(heads, std::vector<int>(units_of_head, 0)) {}

    bool add(int head, int begin, int end) {
        for (int unit = begin; unit < end; ++unit) {
            if (units.at(head).at(unit)++ != 0) {
                return false;
            }
        }
        return true;
    }
    bool has_all(int head) const {
        return std::count(units[head].begin(), units[head].end(), 1) == static_cast<int>(units[head].size());
    }
};

const char *fault(const WorkOrder &order, int count, bool has_convert) {
    constexpr int kUnits = flash::sm90::kRowsOfWorkTile / flash::sm90::kRowsOfUnit;
    Done prepared(order.heads(), order.units()), converted(order.heads(), order.units());
    Done computed(order.heads(), order.compute);
    const auto units_of = [&](const WorkTile &tile) {
        return RowUnits{tile.head, tile.index * kUnits, std::min((tile.index + 1) * kUnits, order.units())};
    };
    const auto convert = [&](const RowUnits &units) -> const char * {
        if (units.begin < units.end && !computed.has_all(units.head)) {
            return "convert comes before compute";
        }
        return converted.add(units.head, units.begin, units.end) ? nullptr : "rows are converted twice";
    };
    for (int number = 0; number < count; ++number) {
        const WorkTile tile = order.at(number);
        const int limit = tile.phase == Phase::compute ? order.compute : order.row_tiles();
        if (tile.head < 0 || tile.head >= order.heads() || tile.index < 0 || tile.index >= limit) {
            return "a work tile that does not exist";
        }
        const char *what = nullptr;
        if (tile.phase == Phase::preprocess) {
            const RowUnits units = units_of(tile);
            what = prepared.add(units.head, units.begin, units.end) ? nullptr : "rows are prepared twice";
        } else if (tile.phase == Phase::convert) {
            what = convert(units_of(tile));
        } else if (!prepared.has_all(tile.head)) {
            what = "compute comes before preprocess";
        } else if (!computed.add(tile.head, tile.index, tile.index + 1)) {
            what = "keys are computed twice";
        } else {
            const RowUnits units = order.prepared_beside(tile);
            what = prepared.add(units.head, units.begin, units.end) ? convert(order.converted_beside(tile))
                                                                    : "rows are prepared twice";
        }
        if (what != nullptr) {
            return what;
        }
    }
    for (int head = 0; head < order.heads(); ++head) {
        if (!prepared.has_all(head) || !computed.has_all(head) || (has_convert && !converted.has_all(head))) {
            return "work is left";
        }
    }
    return nullptr;
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
        const RowBlocks blocks(nullptr, 0, params.seqlen_k, params.b, heads, draw(0, 1) == 0 ? 64 : 128);
        const bool is_beside = draw(0, 1) == 0;
        const WorkOrder order(params, blocks, /*is_local=*/draw(0, 1) == 0, is_beside);
        const int count = static_cast<int>(WorkOrder::count(params, blocks, is_beside));
        if (const char *what = fault(order, count, params.dq_accum != nullptr)) {
            std::printf("%s: b=%d h=%d heads_per_dkv=%d seqlen_q=%d seqlen_k=%d group=%d is_beside=%d\n", what, params.b, params.h,
                        params.heads_per_dkv, params.seqlen_q, params.seqlen_k, params.interleaved_heads, is_beside);
            return 1;
        }
    }
}
