// Where the rows of a tile of dQ's accumulator belong.
#pragma once

#include "../common/block_info.h"

namespace flash::sm90 {

// The 64 padded rows of a tile of the accumulator: of one head and one sequence.
struct DqRows {
    int64_t target;          // of the first row, in dQ: elements
    int has_begin, has_end;  // rows that see keys, counted from the first
    int count;               // rows of the sequence

    __device__ DqRows() = default;
    __device__ DqRows(const Flash_bwd_params &params, int64_t padded_row, bool is_local) {
        constexpr int kRounded = Flash_bwd_params::kRowsRounded;
        const auto [bidb, bidh, block] =
            row_blocks(params, kRounded).place(static_cast<int>(padded_row / kRounded), /*is_reversed=*/false);
        const Sequence seq = sequence(params, bidb);
        const int first_row = block * kRounded + static_cast<int>(padded_row % kRounded);
        const KeyRange<true> range(params, seq.seqlen_q, seq.seqlen_k);
        target = bidb * params.dq.batch_stride + bidh * params.dq.head_stride +
                 (int64_t{seq.q_begin} + first_row) * params.dq.row_stride;
        has_begin = (is_local ? range.begin_row() : 0) - first_row;
        has_end = (is_local ? range.end_row() : seq.seqlen_k == 0 ? 0 : seq.seqlen_q) - first_row;
        count = seq.seqlen_q - first_row;
    }
};

}  // namespace flash::sm90
