// run_prepare_key_ranges: what common/key_ranges.h reads, from key_ranges as the caller gives it.
#include <cute/tensor.hpp>

#include "dispatch/launch.h"
#include "dispatch/run_flash.h"
#include "key_ranges.h"

namespace flash {
namespace {

constexpr int kRows = Flash_bwd_params::kRowsRounded;  // padded rows of a CTA, one for each thread
constexpr unsigned kAllLanes = 0xffffffffu;

// Sorted and disjoint, and inside [begin, end).
__device__ __forceinline__ VisibleKeys visible_keys(const int *pairs, int count, int begin, int end) {
    const auto clamped = [&](int i) {
        const int2 range{max(pairs[2 * i], begin), min(pairs[2 * i + 1], end)};
        return range.x < range.y ? range : int2{kNoKey, 0};
    };
    int2 first = clamped(0), second = count == 2 ? clamped(1) : int2{kNoKey, 0};
    if (second.x < first.x) {
        const int2 swapped = first;
        first = second;
        second = swapped;
    }
    if (second.x <= first.y) {  // they overlap or touch
        first.y = max(first.y, second.y);
        second = {kNoKey, 0};
    }
    const int2 none{0, 0};
    first = first.y == 0 ? none : first;
    second = second.y == 0 ? none : second;
    return {first.x, first.y, second.x, second.y};
}

// Records that the rows [first_row, end_row) visit the columns [begin, end). `threads` threads share the columns.
__device__ __forceinline__ void add_to_columns(int *columns, int begin, int end, int first_row, int end_row,
                                               int threads) {
    for (int column = begin + static_cast<int>(threadIdx.x) % threads; column < end; column += threads) {
        atomicMax(&columns[2 * column], kNoKey - first_row);
        atomicMax(&columns[2 * column + 1], end_row);
    }
}

__global__ void __launch_bounds__(kRows)
    prepare_key_ranges(const __grid_constant__ Flash_fwd_params params, const __grid_constant__ RowBlocks row_blocks) {
    const KeyRanges &ranges = params.key_ranges;
    const auto [bidb, bidh, block] = row_blocks.place(blockIdx.x, /*is_reversed=*/false);
    const Sequence seq = sequence(params, bidb);
    const int row = block * kRows + static_cast<int>(threadIdx.x), lane = threadIdx.x % 32;
    const bool is_row = row < seq.seqlen_q;
    VisibleKeys keys{};
    if (is_row) {
        const KeyRange<true> mask(params, seq.seqlen_q, seq.seqlen_k);
        const int *pairs = ranges.ptr + bidb * ranges.batch_stride + bidh * ranges.head_stride +
                           int64_t(seq.q_begin + row) * ranges.row_stride;
        keys = visible_keys(pairs, ranges.count, mask.begin_key(row), mask.end_key(row));
    }
    const int64_t padded_row = int64_t(blockIdx.x) * kRows + threadIdx.x;
    reinterpret_cast<int4 *>(ranges.rows)[padded_row] = {keys.begin0, keys.end0, keys.begin1, keys.end1};

    const auto min_of = [](int x) { return __reduce_min_sync(kAllLanes, x); };
    const auto max_of = [](int x) { return __reduce_max_sync(kAllLanes, x); };
    const bool has_first = keys.end0 > 0, has_second = keys.end1 > 0;
    int4 hulls, full;
    hulls.x = min_of(has_first ? keys.begin0 : kNoKey);
    hulls.y = max_of(keys.end0);
    hulls.z = min_of(has_second ? keys.begin1 : kNoKey);
    hulls.w = max_of(keys.end1);
    full.x = max_of(has_first ? keys.begin0 : is_row ? kNoKey : 0);
    full.y = min_of(is_row ? keys.end0 : kNoKey);
    full.z = max_of(has_second ? keys.begin1 : is_row ? kNoKey : 0);
    full.w = min_of(is_row ? keys.end1 : kNoKey);
    static_assert(KeyRanges::kRowsPerBlock == 32, "the rows of a warp");
    if (lane == 0) {
        int4 *target = reinterpret_cast<int4 *>(ranges.blocks) + padded_row / KeyRanges::kRowsPerBlock * 2;
        target[0] = hulls;
        target[1] = full;
    }
    if (ranges.columns == nullptr) {
        return;
    }
    int first_row = row - lane, rows = KeyRanges::kRowsPerBlock;  // of the columns; a thread for each row writes them
    if (ranges.has_wide_columns) {
        __shared__ int begin_of_warps[kRows / 32], end_of_warps[kRows / 32];
        if (lane == 0) {
            begin_of_warps[threadIdx.x / 32] = hulls.x;
            end_of_warps[threadIdx.x / 32] = max(hulls.y, hulls.w);
        }
        __syncthreads();
        for (int warp = 0; warp < kRows / 32; ++warp) {
            hulls.x = min(hulls.x, begin_of_warps[warp]);
            hulls.y = max(hulls.y, end_of_warps[warp]);
        }
        hulls.w = 0;
        first_row = block * kRows;
        rows = kRows;
    }
    if (hulls.y > 0) {
        constexpr int kKeys = KeyRanges::kKeysPerColumn;
        const int64_t of_sequence =
            params.cu_seqlens_k == nullptr
                ? 0
                : first_block(load_cu_seqlen(params.cu_seqlens_k, bidb, params.total_k), bidb, kKeys);
        int *columns =
            ranges.columns + 2 * (bidb * ranges.columns_batch_stride + bidh * ranges.columns_head_stride + of_sequence);
        const int end_row = min(first_row + rows, seq.seqlen_q);
        const int end = (hulls.y + kKeys - 1) / kKeys;
        add_to_columns(columns, hulls.x / kKeys, end, first_row, end_row, rows);
        if (hulls.w > 0) {
            add_to_columns(columns, max(hulls.z / kKeys, end), (hulls.w + kKeys - 1) / kKeys, first_row, end_row, rows);
        }
    }
}

}  // namespace

void run_prepare_key_ranges(const Flash_fwd_params &params, cudaStream_t stream) {
    const bool is_varlen = params.cu_seqlens_q != nullptr;
    const RowBlocks blocks(params.cu_seqlens_q, params.total_q, params.seqlen_q,
                           is_varlen || params.key_ranges.rows_batch_stride != 0 ? params.b : 1,
                           params.key_ranges.rows_head_stride != 0 ? params.h : 1, kRows);
    check_grid(blocks.count(), "batch * nheads * blocks of query rows");
    if (blocks.count() > 0) {
        prepare_key_ranges<<<static_cast<unsigned>(blocks.count()), kRows, 0, stream>>>(params, blocks);
        check_cuda(cudaGetLastError(), "launching prepare_key_ranges");
    }
}

}  // namespace flash
