// Attention with split keys: flash_fwd_splitkv_kernel -> compute_attn_1run, for each run of keys that the schedule
// gives to the CTA. The rows of a tile are the queries of all heads that share a key/value head: row r is query r /
// h_h_k_ratio of head r % h_h_k_ratio. So each key is read once for all of them.
#pragma once

#include "../common/score_mod.h"
#include "../common/softmax.h"
#include "key_tiles.h"

namespace flash::kvcache {

using namespace cute;

// Where the partial results of one slot lie. rows: of a row tile.
struct Slot {
    float *o;           // [rows, kHeadDim], not normalised
    float *statistics;  // [rows, 2]: maximum and sum

    __device__ Slot(const Flash_fwd_params &params, const SplitkvPlan &plan, int kHeadDim, int64_t slot, int row_tile) {
        const int rows = min(plan.tile_rows, params.seqlen_q * params.h_h_k_ratio);
        const int64_t index = slot * plan.row_tiles + row_tile, count = plan.slots(params) * plan.row_tiles;
        o = params.cache.scratch + index * rows * kHeadDim;
        statistics = params.cache.scratch + count * rows * kHeadDim + index * rows * 2;
    }
};

// Stores `kColumns` finished values of a row of the output.
template <typename Element>
__device__ __forceinline__ void store_out(const Flash_fwd_params &params, int bidb, int bidh, int query, int column,
                                          const float (&o)[4]) {
    Element *target = static_cast<Element *>(params.o.ptr) + bidb * params.o.batch_stride +
                      query * params.o.row_stride + bidh * params.o.head_stride + column;
    if (column + 4 <= params.d && reinterpret_cast<uintptr_t>(target) % 8 == 0) {
        *reinterpret_cast<uint2 *>(target) = make_uint2(pack<Element>(o[0], o[1]), pack<Element>(o[2], o[3]));
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (column + i < params.d) {
            target[i] = static_cast<Element>(o[i]);
        }
    }
}

// The log-sum-exp of a row from its maximum (unscaled) and sum.
__device__ __forceinline__ void store_lse(const Flash_fwd_params &params, int bidb, int bidh, int query, float row_max,
                                          float row_sum) {
    static_cast<float *>(params.softmax_lse)[bidb * params.lse_batch_stride + bidh * params.lse_head_stride + query] =
        row_sum == 0.0f ? -INFINITY : __fmul_rn(row_max, params.scale_softmax) + logf(row_sum);
}

// The weight of a partial result whose maximum is row_max, in a sum whose maximum is total_max.
__device__ __forceinline__ float weight_of(float row_max, float total_max, float scale_log2) {
    return row_max == -INFINITY ? 0.0f : exp2_approx((row_max - total_max) * scale_log2);
}

template <typename Traits>
class RunOfKeys {
    using Element = typename Traits::Element;
    static constexpr int kHeadDim = Traits::kHeadDim, kKeys = Traits::kKeys, kRowTiles = Traits::kRowTiles;
    static constexpr int kNRows = 2 * kRowTiles;  // rows of a thread
    using SoftmaxState = Softmax<kNRows>;

public:
    // Keys [begin, end) of one head of one sequence.
    __device__ RunOfKeys(const Flash_fwd_params &params, const SplitkvPlan &plan,
                         typename Traits::SharedStorage &shared, const Sequence &sequence, int bidb, int bidh_k,
                         int begin, int end)
        : params(params),
          plan(plan),
          shared(shared),
          sequence(sequence),
          bidb(bidb),
          bidh_k(bidh_k),
          begin(begin),
          end(end),
          rows(params.seqlen_q * params.h_h_k_ratio),
          first_row(blockIdx.x * Traits::kRows),
          softmax(params.scale_softmax_log2) {
        // A row tile may see less than the call as a whole.
        const KeyRange<true> range(params, sequence.seqlen_q, sequence.seqlen_k);
        this->begin = max(begin, range.begin_key(query_of(first_row)));
        this->end = min(end, range.end_key(query_of(min(first_row + Traits::kRows, rows) - 1)));
    }

    // Leaves the results of all groups in shared memory.
    __device__ __forceinline__ void compute() {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    acc_o[i][n][j] = 0.0f;
                }
            }
        }
        if (threadIdx.x < Traits::kRows) {
            const int row = min(first_row + static_cast<int>(threadIdx.x), rows - 1);
            shared.query[threadIdx.x] = query_of(row);
            shared.slope[threadIdx.x] = ScoreMod(params, bidb, head_of(row), 0).slope;
        }
        __syncthreads();  // the rows' queries and slopes are there
        if (begin < end) {
            loop();
        }
        cp_async_wait_group<0>();
        __syncthreads();  // all warps are done with the key tiles: the results take their place
        store_results();
        __syncthreads();  // the results are complete
    }

    // Sums the groups' results and stores the finished rows.
    __device__ __forceinline__ void store() const {
        for_each_result([&](int row, int column, float row_max, float row_sum, float (&o)[4]) {
            const int query = query_of(first_row + row), bidh = head_of(first_row + row);
            const float inverse = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                o[i] = row_sum == 0.0f ? 0.0f : o[i] * inverse;
            }
            store_out<Element>(params, bidb, bidh, query, column, o);
            if (column == 0) {
                store_lse(params, bidb, bidh, query, row_max, row_sum);
            }
        });
    }

    // Sums the groups' results and stores them in a slot.
    __device__ __forceinline__ void store_partial(int64_t slot_index) const {
        const Slot slot(params, plan, kHeadDim, slot_index, blockIdx.x);
        for_each_result([&](int row, int column, float row_max, float row_sum, float (&o)[4]) {
            *reinterpret_cast<float4 *>(slot.o + row * kHeadDim + column) = make_float4(o[0], o[1], o[2], o[3]);
            if (column == 0) {
                slot.statistics[row * 2] = row_max;
                slot.statistics[row * 2 + 1] = row_sum;
            }
        });
    }

private:
    const Flash_fwd_params &params;
    const SplitkvPlan &plan;
    typename Traits::SharedStorage &shared;
    const Sequence &sequence;
    const int bidb, bidh_k;
    int begin, end;
    const int rows;       // of all row tiles
    const int first_row;  // of this tile
    SoftmaxState softmax;
    float acc_o[kRowTiles][kHeadDim / 8][4];

    __device__ int query_of(int row) const { return row / params.h_h_k_ratio; }
    __device__ int head_of(int row) const {
        return bidh_k * params.h_h_k_ratio + row - query_of(row) * params.h_h_k_ratio;
    }
    // Row i of this thread, in the tile.
    __device__ static int row_of_thread(int i) {
        const int warp = threadIdx.x / 32 % Traits::kRowWarps;
        return (warp * kRowTiles + i / 2) * 16 + i % 2 * 8 + static_cast<int>(threadIdx.x % 32) / 4;
    }

    // (row, col) of an accumulator [kRowTiles][kColumns / 8][4].
    template <int kColumns>
    __device__ static auto rowcol(float (&acc)[kRowTiles][kColumns / 8][4]) {
        using Rows = cute::Layout<Shape<_2, Int<kRowTiles>>, Stride<_2, Int<kColumns / 2>>>;
        using Cols = cute::Layout<Shape<_2, Int<kColumns / 8>>, Stride<_1, _4>>;
        return make_tensor(&acc[0][0][0], make_layout(Rows{}, Cols{}));
    }

    __device__ __forceinline__ void loop() {
        const int group = threadIdx.x / Traits::kGroupThreads, thread = threadIdx.x % Traits::kGroupThreads;
        const KeySource<Traits> source(params, sequence, bidb, bidh_k);
        auto &buffers = shared.pipeline.kv[group];
        TileLoader<Traits> loader(source, buffers, thread, begin + group * kKeys, end, params.d, plan.is_aligned);
#pragma unroll
        for (int i = 0; i < Traits::kStages - 1; ++i) {
            loader.load();
        }

        uint32_t q[Traits::kQInRegisters ? kHeadDim / 16 : 1][4];
        if constexpr (Traits::kQInRegisters) {
            load_q(q);
        } else {
            store_q();
            __syncthreads();  // Q is complete
        }
        const KeyRange<true> range(params, sequence.seqlen_q, sequence.seqlen_k);
        // Every row of the tile sees the keys in between.
        const int full_begin = range.begin_key(query_of(min(first_row + Traits::kRows, rows) - 1));
        const int full_end = range.end_key(query_of(first_row));
        const bool is_warp_idle = first_row + row_of_thread(0) - static_cast<int>(threadIdx.x % 32) / 4 >= rows;

        int stage = 0;
        for (int key = begin + group * kKeys; key < end; key += Traits::kUnit) {
            cp_async_wait_group<Traits::kStages - 2>();
            sync_group();  // the tile is there for all threads, and all are done with the tile before
            loader.load();
            if (Traits::kRowWarps == 1 || !is_warp_idle) {
                const uint32_t tile = static_cast<uint32_t>(__cvta_generic_to_shared(&buffers[stage]));
                const bool needs_mask = key < full_begin || key + kKeys > min(full_end, end);
                step(tile, q, key, needs_mask);
            }
            stage = stage + 1 == Traits::kStages ? 0 : stage + 1;
        }
    }

    __device__ __forceinline__ static void sync_group() {
        if constexpr (Traits::kRowWarps == 1) {
            __syncwarp();
        } else {
            asm volatile("bar.sync 1, %0;" ::"n"(Traits::kGroupThreads) : "memory");
        }
    }

    // One key tile: S = Q K^T, softmax, O += P V.
    template <typename Q>
    __device__ __forceinline__ void step(uint32_t tile, const Q &q, int first_key, bool needs_mask) {
        const int lane = threadIdx.x % 32;
        float acc_s[kRowTiles][kKeys / 8][4] = {};
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
            uint32_t b[kKeys / 16][4];
#pragma unroll
            for (int n = 0; n < kKeys / 16; ++n) {
                ldmatrix_x4(b[n], tile + chunk_offset<Traits>(n * 16 + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
            }
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                uint32_t a[4];
                if constexpr (Traits::kQInRegisters) {
                    a[0] = q[k][0], a[1] = q[k][1], a[2] = q[k][2], a[3] = q[k][3];
                } else {
                    ldmatrix_x4(a, q_address(i, k));
                }
#pragma unroll
                for (int n = 0; n < kKeys / 16; ++n) {
                    mma_m16n8k16<Element>(acc_s[i][2 * n], a, b[n][0], b[n][1]);
                    mma_m16n8k16<Element>(acc_s[i][2 * n + 1], a, b[n][2], b[n][3]);
                }
            }
        }

        Tensor scores = rowcol<kKeys>(acc_s);
        modify_and_mask(scores, first_key, needs_mask);
        Tensor o = rowcol<kHeadDim>(acc_o);
        softmax.step(scores, o);

        const uint32_t tile_v = tile + Traits::kTileElements * sizeof(Element);
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k) {
            uint32_t p[kRowTiles][4];
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                const auto &low = acc_s[i][2 * k], &high = acc_s[i][2 * k + 1];
                p[i][0] = pack<Element>(low[0], low[1]);
                p[i][1] = pack<Element>(low[2], low[3]);
                p[i][2] = pack<Element>(high[0], high[1]);
                p[i][3] = pack<Element>(high[2], high[3]);
            }
#pragma unroll
            for (int n = 0; n < kHeadDim / 16; ++n) {
                uint32_t b[4];
                ldmatrix_x4_transposed(b, tile_v + chunk_offset<Traits>(k * 16 + lane % 16, 2 * n + lane / 16));
#pragma unroll
                for (int i = 0; i < kRowTiles; ++i) {
                    mma_m16n8k16<Element>(acc_o[i][2 * n], p[i], b[0], b[1]);
                    mma_m16n8k16<Element>(acc_o[i][2 * n + 1], p[i], b[2], b[3]);
                }
            }
        }
    }

    // Softcap, ALiBi and the mask; the same arithmetic as ScoreMod::apply.
    template <typename TensorS>
    __device__ __forceinline__ void modify_and_mask(TensorS &scores, int first_key, bool needs_mask) const {
        const auto key_of = [&](int col) {
            return first_key + col / 2 * 8 + static_cast<int>(threadIdx.x % 4) * 2 + col % 2;
        };
        if (params.softcap_scale != 0.0f) {
#pragma unroll
            for (int i = 0; i < size(scores); ++i) {
                scores(i) = tanh_approx(scores(i) * params.softcap_scale);
            }
        }
        if (params.alibi_slopes != nullptr) {
#pragma unroll
            for (int row = 0; row < kNRows; ++row) {
                const int position = shared.query[row_of_thread(row)] + sequence.seqlen_k - sequence.seqlen_q;
                const float slope = shared.slope[row_of_thread(row)];
#pragma unroll
                for (int col = 0; col < size<1>(scores); ++col) {
                    scores(row, col) -= slope * fabsf(float(position - key_of(col)));
                }
            }
        }
        if (needs_mask) {
            const KeyRange<true> range(params, sequence.seqlen_q, sequence.seqlen_k);
#pragma unroll
            for (int row = 0; row < kNRows; ++row) {
                const int query = shared.query[row_of_thread(row)];
                const int begin_key = range.begin_key(query), end_key = min(range.end_key(query), end);
#pragma unroll
                for (int col = 0; col < size<1>(scores); ++col) {
                    const bool is_visible = key_of(col) >= begin_key && key_of(col) < end_key;
                    scores(row, col) = is_visible ? scores(row, col) : -INFINITY;
                }
            }
        }
    }

    // ---- Q ----------------------------------------------------------------------------------------------------------

    // The address of a row of Q in the tile; null past the last row.
    __device__ const Element *q_row(int row) const {
        if (first_row + row >= rows) {
            return nullptr;
        }
        return static_cast<const Element *>(params.q.ptr) + bidb * params.q.batch_stride +
               query_of(first_row + row) * params.q.row_stride + head_of(first_row + row) * params.q.head_stride;
    }

    // Registers of the A operand: rows lane / 4 and + 8, columns 2 (lane % 4) and + 8.
    __device__ __forceinline__ void load_q(uint32_t (&q)[kHeadDim / 16][4]) const {
        const Element *row[2] = {q_row(row_of_thread(0)), q_row(row_of_thread(1))};
        const bool is_even = (params.q.row_stride | params.q.head_stride | params.q.batch_stride) % 2 == 0 &&
                             reinterpret_cast<uintptr_t>(params.q.ptr) % 4 == 0;
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = k * 16 + i / 2 * 8 + static_cast<int>(threadIdx.x % 4) * 2;
                q[k][i] = row[i % 2] == nullptr ? 0 : load_pair(row[i % 2] + column, params.d - column, is_even);
            }
        }
    }

    __device__ __forceinline__ static uint32_t load_pair(const Element *source, int columns, bool is_even) {
        if (columns >= 2 && is_even) {
            return *reinterpret_cast<const uint32_t *>(source);
        }
        const uint16_t *elements = reinterpret_cast<const uint16_t *>(source);
        return (columns > 0 ? elements[0] : 0u) | (columns > 1 ? uint32_t(elements[1]) << 16 : 0u);
    }

    // Q in shared memory, in the layout of key tiles of kKeys rows.
    __device__ __forceinline__ void store_q() {
        for (int index = threadIdx.x; index < Traits::kRows * Traits::kChunks; index += Traits::kThreads) {
            const int row = index / Traits::kChunks, chunk = index % Traits::kChunks;
            const Element *source = q_row(row);
            const uint4 x =
                source == nullptr ? uint4{0, 0, 0, 0} : load_chunk(source + chunk * 8, params.d - chunk * 8);
            Element *target = shared.pipeline.q + row / Traits::kKeys * Traits::kTileElements +
                              chunk_offset<Traits>(row % Traits::kKeys, chunk) / int(sizeof(Element));
            *reinterpret_cast<uint4 *>(target) = x;
        }
    }

    __device__ __forceinline__ uint32_t q_address(int i, int k) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % Traits::kRowWarps;
        const int row = (warp * kRowTiles + i) * 16 + lane % 16, chunk = 2 * k + lane / 16;
        return static_cast<uint32_t>(__cvta_generic_to_shared(shared.pipeline.q)) +
               row / Traits::kKeys * Traits::kTileElements * sizeof(Element) +
               chunk_offset<Traits>(row % Traits::kKeys, chunk);
    }

    // ---- results ----------------------------------------------------------------------------------------------------

    __device__ __forceinline__ void store_results() {
        auto &results = shared.results;
        const int group = threadIdx.x / Traits::kGroupThreads;
#pragma unroll
        for (int row = 0; row < kNRows; ++row) {
            const int at = row_of_thread(row);
            const float sum = quad_allreduce(softmax.row_sum[row], [](float a, float b) { return a + b; });
            if (threadIdx.x % 4 == 0) {
                results.row_max[group][at] = softmax.row_max[row];
                results.row_sum[group][at] = sum;
            }
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n) {
                const float *o = acc_o[row / 2][n] + row % 2 * 2;
                *reinterpret_cast<float2 *>(&results.o[group][at][n * 8 + threadIdx.x % 4 * 2]) =
                    make_float2(o[0], o[1]);
            }
        }
    }

    // Calls function(row, column, row_max, row_sum, o) for four columns of a row at a time, summed over the groups.
    template <typename Function>
    __device__ __forceinline__ void for_each_result(const Function &function) const {
        const auto &results = shared.results;
        constexpr int kVectors = kHeadDim / 4;
        const int count = min(Traits::kRows, rows - first_row) * kVectors;
        for (int index = threadIdx.x; index < count; index += Traits::kThreads) {
            const int row = index / kVectors, column = index % kVectors * 4;
            float row_max = results.row_max[0][row];
#pragma unroll
            for (int group = 1; group < Traits::kGroups; ++group) {
                row_max = fmaxf(row_max, results.row_max[group][row]);
            }
            float row_sum = 0.0f, o[4] = {};
#pragma unroll
            for (int group = 0; group < Traits::kGroups; ++group) {
                const float weight = weight_of(results.row_max[group][row], row_max, params.scale_softmax_log2);
                if (weight != 0.0f) {  // a row that saw no key of the group may hold NaN
                    row_sum += weight * results.row_sum[group][row];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        o[i] += weight * results.o[group][row][column + i];
                    }
                }
            }
            function(row, column, row_max, row_sum, o);
        }
    }
};

// The runs of keys of one CTA. Row tiles of the same keys are neighbours, so that they share the keys in L2.
template <typename Traits>
__device__ __forceinline__ void compute_attn_splitkv(const Flash_fwd_params &params, const SplitkvPlan &plan,
                                                     typename Traits::SharedStorage &shared) {
    constexpr int kUnit = Traits::kUnit;
    Schedule<Traits::kThreads, kUnit> schedule(params, shared.schedule);
    const bool is_fixed = plan.max_splits > 0;
    const int64_t piece = blockIdx.y;
    const int64_t pieces = schedule.used_pieces(plan);
    const int64_t unit_begin = schedule.begin_of(piece, pieces);
    int64_t left = schedule.begin_of(piece + 1, pieces) - unit_begin;
    if (left <= 0) {
        return;
    }
    auto [bidb, bidh_k, unit] = schedule.find(unit_begin).place;
    while (left > 0) {
        const Sequence seq = sequence(params, bidb);
        const Units units(params, seq, kUnit);
        for (; left > 0 && bidh_k < params.h_k; ++bidh_k, unit = 0) {
            while (left > 0 && unit < units.count) {
                const int run = is_fixed ? 1 : static_cast<int>(min(left, int64_t(units.count - unit)));
                const int next = unit + run;
                RunOfKeys<Traits> keys(params, plan, shared, seq, bidb, bidh_k, units.first_key(unit),
                                       units.first_key(next));
                keys.compute();
                if (unit == 0 && next == units.count) {
                    keys.store();
                } else if (is_fixed) {
                    keys.store_partial((int64_t(bidb) * params.h_k + bidh_k) * plan.max_splits + unit);
                } else {
                    keys.store_partial(2 * piece + (unit == 0 ? 1 : 0));
                }
                __syncthreads();  // the results are read: key tiles may take their place
                left -= run;
                unit = next;
            }
        }
        bidh_k = 0;
        ++bidb;
    }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtasPerSM)
    flash_fwd_splitkv_kernel(const __grid_constant__ Flash_fwd_params params,
                             const __grid_constant__ SplitkvPlan plan) {
    extern __shared__ __align__(128) char smem[];
    wait_for_previous_kernel();
    launch_dependents();
    compute_attn_splitkv<Traits>(params, plan, *reinterpret_cast<typename Traits::SharedStorage *>(smem));
}

}  // namespace flash::kvcache
