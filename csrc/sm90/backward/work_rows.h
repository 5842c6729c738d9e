// The rows of a work tile of preprocess or convert, and how its warps divide them.
#pragma once

#include "common/preprocess_rows.h"
#include "dispatch/kind.h"
#include "kvcache/mma.h"
#include "sm90/common/find_block.h"
#include "work_tiles_bwd.h"

namespace flash::sm90 {

// The padded query rows of a work tile. A part has a few of them, of one head and one sequence, or some of their
// columns. Warp w of n works on parts w, w + n, w + 2 n, ...
template <typename Traits, Kind kKind>
struct WorkRows {
    static constexpr int kWarps = Traits::kNThreads / 32;
    int64_t begin;     // in the padded row statistics
    int count;         // a multiple of 128
    int bidb, bidh;    // bidh: of the first query head
    int64_t in_heads;  // the first row, counted from the first row of that head

    __device__ WorkRows(const Flash_bwd_params &params, const WorkOrder &order, const WorkTile &tile) {
        int bidh_dkv;
        order.by_sequence(bidb, bidh_dkv, tile.head);
        bidh = bidh_dkv * params.heads_per_dkv;
        in_heads = int64_t{tile.index} * Traits::kRowsPerTile;
        const int64_t of_head = params.padded_head_stride * params.heads_per_dkv;  // of dK and dV
        begin = tile.head * of_head + in_heads;
        count = static_cast<int>(cute::min(of_head - in_heads, int64_t{Traits::kRowsPerTile}));
    }

    // offset: a row of the work tile, the same in all lanes of a warp.
    __device__ __forceinline__ PaddedRow at(const Flash_bwd_params &params, int offset) const {
        constexpr int kRounded = Flash_bwd_params::kRowsRounded;
        int64_t in_head = in_heads + offset;
        int head = bidh;
        if (params.heads_per_dkv > 1) {
            head += static_cast<int>(in_head / params.padded_head_stride);
            in_head %= params.padded_head_stride;
        }
        if (!may_be_varlen(kKind) || params.cu_seqlens_q == nullptr) {
            return {begin + offset, bidb, head, sequence<may_be_varlen(kKind)>(params, bidb), int(in_head)};
        }
        const auto [found, block] =
            find_block_by_warp(params.cu_seqlens_q, params.b, params.total_q, kRounded, in_head / kRounded);
        return {begin + offset, found, head, sequence(params, found), block * kRounded + int(in_head % kRounded)};
    }

    // How many stages of `bytes` bytes each warp has: as many as fit into `room` bytes, at most one for each of its
    // parts. `parts`: of a work tile.
    static constexpr int stages(int room, int bytes, int parts) {
        return cute::max(cute::min(room / (kWarps * bytes), (parts + kWarps - 1) / kWarps), 1);
    }

    // Calls load(stage, part) and finish(stage, part) for every part of the warp, of `parts` in all. Each warp has
    // `kStages` stages of its own in shared memory. load() copies a part by cp.async, and stages full of parts are on
    // their way at a time: as code, a loop needs less of the instruction cache than parts in registers, which every CTA
    // would load anew. beside() runs once, behind the first loads.
    template <int kStages, typename Load, typename Beside, typename Finish>
    __device__ __forceinline__ static void for_each_part(int parts, const Load &load, const Beside &beside,
                                                         const Finish &finish) {
        int next = threadIdx.x / 32;
        CUTE_NO_UNROLL
        for (int stage = 0; stage < kStages; ++stage, next += kWarps) {
            if (next < parts) {
                load(stage, next);
            }
            kvcache::cp_async_commit();
        }
        beside();
        int stage = 0;
        CUTE_NO_UNROLL
        for (int part = threadIdx.x / 32; part < parts; part += kWarps, next += kWarps) {
            kvcache::cp_async_wait_group<kStages - 1>();
            __syncwarp();  // all lanes' copies are there
            finish(stage, part);
            __syncwarp();  // all lanes have read the stage
            if (next < parts) {
                load(stage, next);
            }
            kvcache::cp_async_commit();
            stage = stage + 1 == kStages ? 0 : stage + 1;
        }
    }
};

}  // namespace flash::sm90
