// The first phase of the backward, for the rows of a work tile: delta = rowsum(dO * O) - dLSE, the log-sum-exp padded
// to whole tiles, a flag for large ones, and zeros in the accumulator of dQ.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_conversion.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "work_counts.h"
#include "work_rows.h"

namespace flash::sm90 {

template <typename Traits, Kind kKind>
class PreprocessBwd {
    using Element = typename Traits::Element;
    using Rows = WorkRows<Traits, kKind>;
    static constexpr int kVector = 16 / sizeof(Element), kVectors = Traits::kHeadDim / kVector;
    static constexpr int kLanes = kVectors <= 8 ? 8 : kVectors <= 16 ? 16 : 32;  // that share a row, 16 bytes each
    static constexpr int kStride = 32 / kLanes;                                  // rows of a warp at a time
    static constexpr int kSteps = 4, kRows = kSteps * kStride;                   // of a part
    static constexpr int kFlagRows = Traits::kBlockM;                            // that share a flag
    static_assert(Flash_bwd_params::kRowsRounded % kFlagRows == 0 && kFlagRows % kRows == 0);
    static_assert(kFlagRows >= Flash_bwd_params::kRowsPerFlag, "large_rows has room for one flag per kRowsPerFlag");
    static constexpr bool kLseInBase2 = stores_lse_in_base_2<Traits, kKind>();
    static constexpr int kThreadOfZeros = Traits::kNThreads - 32;  // of a warp that may have fewer parts

    struct Part {
        uint4 out[kRows][kLanes], dout[kRows][kLanes];
        float lse[kRows], dlse[kRows];  // lse: -inf for rows past the end of the sequence
    };
    struct OfAllWarps {
        uint4 zeros[512];
        int large_rows[Traits::kRowsPerTile / kFlagRows];
    };
    static constexpr int kStages =
        Rows::stages(Traits::kSmemForRows - sizeof(OfAllWarps), sizeof(Part), Traits::kRowsPerTile / kRows);

    const Flash_bwd_params &params;
    const Rows rows;
    const int lane, lane_of_row, row_of_lane;

public:
    struct SharedStorage {
        Part parts[Rows::kWarps][kStages];
        OfAllWarps of_all;
    };
    static_assert(sizeof(SharedStorage) <= Traits::kSmemForRows);

    __device__ PreprocessBwd(const Flash_bwd_params &params, const WorkOrder &order, const WorkTile &tile)
        : params(params),
          rows(params, order, tile),
          lane(threadIdx.x % 32),
          lane_of_row(lane % kLanes),
          row_of_lane(lane / kLanes) {}

    // All threads.
    __device__ __forceinline__ void run(SharedStorage &shared, const WorkCounts &counts, int head) const {
        Part *stages = shared.parts[threadIdx.x / 32];
        bool has_large_rows = false;
        rows.template for_each_part<kStages>(
            rows.count / kRows, [&](int stage, int part) { load(stages[stage], rows.at(params, part * kRows)); },
            [&] { start_zeros(shared.of_all); },
            [&](int stage, int part) {
                if (finish(stages[stage], rows.begin + part * kRows)) {
                    has_large_rows = true;
                    if (lane == 0) {
                        shared.of_all.large_rows[part * kRows / kFlagRows] = 1;
                    }
                }
            });
        if (threadIdx.x == kThreadOfZeros) {
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // the zeros are written
        }
        if (__syncthreads_or(has_large_rows) && kLseInBase2) {
            store_large_lse(shared.of_all);
            __syncthreads();
        }
        if (threadIdx.x == 0) {
            for (int i = 0; i < rows.count / kFlagRows; ++i) {
                params.large_rows[rows.begin / kFlagRows + i] = shared.of_all.large_rows[i];
            }
            counts.add(counts.preprocessed(head));
        }
    }

private:
    // Rows past the end of the sequence are not read.
    __device__ __forceinline__ void load(Part &part, const PaddedRow &first) const {
        const int valid = first.seq.seqlen_q - first.row, begin = first.seq.q_begin + first.row;
        const auto source = [&](const TensorRef &x) {
            return static_cast<const Element *>(x.ptr) + first.bidb * x.batch_stride + first.bidh * x.head_stride +
                   int64_t(begin + row_of_lane) * x.row_stride + lane_of_row * kVector;
        };
        const Element *out = source(params.o), *dout = source(params.dout);
        const bool has_columns = lane_of_row * kVector < params.d;
        CUTE_UNROLL
        for (int step = 0; step < kSteps; ++step) {
            const int row = step * kStride + row_of_lane;
            if (row < valid) {
                copy_16(part.out[row][lane_of_row], out + step * kStride * params.o.row_stride, has_columns);
                copy_16(part.dout[row][lane_of_row], dout + step * kStride * params.dout.row_stride, has_columns);
            }
        }
        if (lane < kRows) {
            const int64_t place =
                first.bidb * params.lse_batch_stride + first.bidh * params.lse_head_stride + begin + lane;
            if (lane < valid) {
                copy_4(part.lse[lane], static_cast<const float *>(params.softmax_lse) + place);
                if (params.dsoftmax_lse != nullptr) {
                    copy_4(part.dlse[lane], static_cast<const float *>(params.dsoftmax_lse) + place);
                }
            } else {
                part.lse[lane] = -INFINITY;
            }
        }
    }

    // Returns, in every lane, whether a row has a large log-sum-exp.
    __device__ __forceinline__ bool finish(const Part &part, int64_t padded_row) const {
        float dot_of_own = 0.0f;
        CUTE_UNROLL
        for (int step = 0; step < kSteps; ++step) {
            const int row = step * kStride + row_of_lane;
            const auto out = floats(part.out[row][lane_of_row]), dout = floats(part.dout[row][lane_of_row]);
            float dot = 0.0f;
            CUTE_UNROLL
            for (int i = 0; i < kVector; ++i) {
                dot += out[i] * dout[i];
            }
            CUTE_UNROLL
            for (int offset = kLanes / 2; offset > 0; offset /= 2) {
                dot += __shfl_xor_sync(0xffffffffu, dot, offset);
            }
            dot_of_own = lane_of_row == step ? dot : dot_of_own;
        }
        bool is_large = false;
        if (lane_of_row < kSteps) {  // the lane has the sum of a row
            const int row = lane_of_row * kStride + row_of_lane;
            // A row without a key has no gradient, whatever dO holds. P = exp(s - inf) = 0 there and past the end.
            const float lse = part.lse[row], dlse = params.dsoftmax_lse == nullptr ? 0.0f : part.dlse[row];
            const bool has_keys = lse != -INFINITY;
            static_cast<float *>(params.dsoftmax_sum)[padded_row + row] = has_keys ? dot_of_own - dlse : 0.0f;
            const float stored_lse = kLseInBase2 ? lse * float(kLog2e) : lse;
            params.lse_padded[padded_row + row] = has_keys ? stored_lse : INFINITY;
            is_large = has_keys && fabsf(lse) > kLargeExponent;
        }
        return __any_sync(0xffffffffu, is_large);
    }

    // Rows that share a flag with a large log-sum-exp keep it as it is: the error of a rounded product with log2(e)
    // would show in the probability. All threads.
    __device__ __forceinline__ void store_large_lse(const OfAllWarps &shared) const {
        CUTE_NO_UNROLL
        for (int i = threadIdx.x / 32 * 32; i < rows.count; i += Traits::kNThreads) {
            if (shared.large_rows[i / kFlagRows] == 0) {
                continue;
            }
            const PaddedRow first = rows.at(params, i);
            const int row = first.row + lane;
            float lse = -INFINITY;
            if (row < first.seq.seqlen_q) {
                lse = static_cast<const float *>(
                    params.softmax_lse)[first.bidb * params.lse_batch_stride + first.bidh * params.lse_head_stride +
                                        first.seq.q_begin + row];
            }
            params.lse_padded[first.padded_row + lane] = lse == -INFINITY ? INFINITY : lse;
        }
    }

    // All threads. The copy engine writes the zeros.
    __device__ __forceinline__ void start_zeros(OfAllWarps &shared) const {
        constexpr int kZeros = sizeof(shared.zeros) / sizeof(uint4);
        for (int i = threadIdx.x; i < kZeros; i += Traits::kNThreads) {
            shared.zeros[i] = {};
        }
        if (threadIdx.x < Traits::kRowsPerTile / kFlagRows) {
            shared.large_rows[threadIdx.x] = 0;
        }
        cutlass::arch::fence_view_async_shared();  // before the copy engine reads the zeros
        __syncthreads();
        if (threadIdx.x == kThreadOfZeros && params.dq_accum != nullptr) {
            auto *accum = reinterpret_cast<char *>(params.dq_accum + rows.begin * Traits::kHeadDim);
            const auto *end = reinterpret_cast<char *>(params.dq_accum + (rows.begin + rows.count) * Traits::kHeadDim);
            CUTE_NO_UNROLL
            for (; accum < end; accum += sizeof(shared.zeros)) {
                cute::SM90_BULK_COPY_S2G::copy(shared.zeros, accum, sizeof(shared.zeros));
            }
            cute::tma_store_arrive();
        }
    }

    __device__ __forceinline__ static auto floats(const uint4 &bits) {
        using Converter = cutlass::NumericArrayConverter<float, Element, kVector>;
        return Converter::convert(reinterpret_cast<const cutlass::Array<Element, kVector> &>(bits));
    }
    __device__ __forceinline__ static void copy_16(uint4 &target, const Element *source, bool has_columns) {
        kvcache::cp_async_16(cute::cast_smem_ptr_to_uint(&target), source, has_columns);
    }
    __device__ __forceinline__ static void copy_4(float &target, const float *source) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(cute::cast_smem_ptr_to_uint(&target)), "l"(source)
                     : "memory");
    }
};

}  // namespace flash::sm90
