// Attention with split keys: flash_fwd_splitkv_kernel -> compute_attn_splitkv -> RunOfKeys, for each run of keys that
// the schedule gives to the CTA. The rows of a tile are the queries of all heads that share a key/value head: row r is
// query r / h_h_k_ratio of head r % h_h_k_ratio. So each key is read once for all of them.
//
// The code is kept short: with few keys, fetching instructions takes longer than executing them.
#pragma once

#include "../common/score_mod.h"
#include "../common/softmax.h"
#include "instructions.h"
#include "key_tiles.h"
#include "splitkv_results.h"

namespace flash::kvcache {

using namespace cute;

// The keys of one head of one sequence that the rows of a row tile see in one run.
struct VisibleKeys {
    Sequence sequence;
    int bidb, bidh_k;
    int begin, end;
    int full_begin, full_end;  // every row sees the keys in between

    VisibleKeys() = default;
    // Of keys [begin, end).
    __device__ VisibleKeys(const Flash_fwd_params &params, const SplitkvPlan &plan, const Sequence &sequence, int bidb,
                           int bidh_k, int begin, int end)
        : sequence(sequence), bidb(bidb), bidh_k(bidh_k) {
        const KeyRange<true> range(params, sequence.seqlen_q, sequence.seqlen_k);
        const int first_row = blockIdx.x * plan.tile_rows,
                  last_row = min(first_row + plan.tile_rows, params.seqlen_q * params.h_h_k_ratio) - 1;
        const int first_query = plan.by_ratio.div(first_row), last_query = plan.by_ratio.div(last_row);
        this->begin = uniform(max(begin, range.begin_key(first_query)));
        this->end = uniform(min(end, range.end_key(last_query)));
        full_begin = uniform(range.begin_key(last_query));
        full_end = uniform(min(range.end_key(first_query), this->end));
    }
};

// What one run of a CTA leaves to the next.
struct PipelineState {
    int stage = 0;             // of the next tile that is multiplied
    int loads = 0;             // calls of load() for the next run before it, at most kStages - 1, each with a commit
    bool has_queries = false;  // the copy of the next run's queries has begun
};

template <typename Traits>
class RunOfKeys {
    using Element = typename Traits::Element;
    static constexpr int kHeadDim = Traits::kHeadDim, kKeys = Traits::kKeys;

public:
    __device__ RunOfKeys(const Flash_fwd_params &params, const SplitkvPlan &plan,
                         typename Traits::SharedStorage &shared, const VisibleKeys &keys)
        : params(params),
          plan(plan),
          shared(shared),
          keys(keys),
          rows(min(plan.tile_rows, params.seqlen_q * params.h_h_k_ratio - int(blockIdx.x) * plan.tile_rows)),
          softmax(params.scale_softmax_log2) {}

    // The loader of all runs of this CTA.
    __device__ __forceinline__ static TileLoader<Traits> loader(const Flash_fwd_params &params, const SplitkvPlan &plan,
                                                                typename Traits::SharedStorage &shared) {
        return {params, plan, group(), static_cast<uint32_t>(__cvta_generic_to_shared(&shared.tiles[group()]))};
    }

    // Leaves the results of all groups in shared memory. Calls while_loading() when the first loads are on their way.
    // With kLoadsNextRun also start_next(), which starts the loader on the next run.
    template <typename WhileLoading, typename StartNext>
    __device__ __forceinline__ void compute(TileLoader<Traits> &loader, PipelineState &state,
                                            const WhileLoading &while_loading, const StartNext &start_next) {
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                acc_o[n][j] = 0.0f;
            }
        }
        loop(loader, state, while_loading, start_next);
        if constexpr (Traits::kLoadsNextRun) {
            results_stage = (state.stage == 0 ? Traits::kStages : state.stage) - 1;
            __syncwarp();  // all lanes are done with the last tile: the results take its place
        } else {
            cp_async_wait_group<0>();
            __syncthreads();  // all warps are done with the key tiles: the results take their place
        }
        store_results();
        __syncthreads();  // the results are complete
    }

    // Starts the copy of Q to shared memory, with zeros past the last row; and stores what masks and ALiBi need to know
    // of each row.
    __device__ __forceinline__ void copy_rows() const {
        const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(q_tile()));
#pragma unroll 1
        for (int index = threadIdx.x; index < plan.tile_rows * Traits::kChunks; index += blockDim.x) {
            const int row = index / Traits::kChunks, chunk = index % Traits::kChunks;
            const RowAt at = row_at(row);
            const bool is_in_range = row < rows && chunk * 8 < params.d;
            const Element *source = static_cast<const Element *>(params.q.ptr) + keys.bidb * params.q.batch_stride +
                                    at.query * params.q.row_stride + at.bidh * params.q.head_stride + chunk * 8;
            const uint32_t to = target + q_offset(row, chunk);
            if (plan.is_q_aligned) {
                cp_async_16(to, source, is_in_range);
            } else {
                copy_chunk(to, source, is_in_range ? params.d - chunk * 8 : 0);
            }
            if (chunk == 0) {
                const RowAt known = row_at(min(row, rows - 1));
                shared.rows[row] = {known.query, ScoreMod(params, keys.bidb, known.bidh, 0).slope};
            }
        }
    }

    // Stores the rows: finished, or in a slot for partial results (slot >= 0).
    __device__ __forceinline__ void store(int64_t slot_index) const {
        const Slot slot(params, plan, kHeadDim, slot_index, blockIdx.x);
#pragma unroll 1
        for (int index = threadIdx.x; index < rows * kVectors; index += blockDim.x) {
            const int row = index / kVectors, column = index % kVectors * 4;
            const RowResult result = result_of_groups(row, column);
            if (slot_index >= 0) {
                slot.store(row, column, kHeadDim, result);
            } else {
                store_finished(row, column, result);
            }
        }
    }

    // The CTAs of a cluster have worked on parts of the keys of one head, in the order of their ranks. Combines their
    // results and stores the rows.
    __device__ __forceinline__ void store_as_cluster(int rank, int cluster) const {
#pragma unroll 1
        for (int index = threadIdx.x; index < rows * kVectors; index += blockDim.x) {
            const int row = index / kVectors, column = index % kVectors * 4;
            const RowResult result = result_of_groups(row, column);
            *reinterpret_cast<float4 *>(results_of(0) + row * Traits::kOStride + column) = result.o;
            if (column == 0) {
                shared.of_cta[row] = {result.row_max, result.row_sum};
            }
        }
        cluster_sync();  // the results of all CTAs are complete
        // Each CTA combines a share of the vectors. `cluster` adjacent lanes, at most half a warp, combine one of them.
        const int vectors = rows * kVectors, share = (vectors + cluster - 1) / cluster;
        const int other_rank = threadIdx.x % cluster;
#pragma unroll 1
        for (int first = 32 / cluster * warp_index(); first < share; first += blockDim.x / cluster) {  // of the warp
            const int of_share = first + threadIdx.x % 32 / cluster, index = rank * share + of_share;
            const bool is_in_range = of_share < share && index < vectors;
            const int row = is_in_range ? index / kVectors : 0, column = index % kVectors * 4;
            const float2 statistics = load_float2(address_in(other_rank, &shared.of_cta[row]));
            const float4 o = load_float4(address_in(other_rank, results_of(0) + row * Traits::kOStride + column));
            RowResult result;
            result.add(statistics.x, statistics.y, o, params.scale_softmax_log2);
#pragma unroll 1
            for (int lanes = 1; lanes < cluster; lanes *= 2) {
                const RowResult other = result.of_lane_xor(lanes);
                result.add(other.row_max, other.row_sum, other.o, params.scale_softmax_log2);
            }
            if (other_rank == 0 && is_in_range) {
                store_finished(row, column, result);
            }
        }
        cluster_sync();  // shared memory outlives its readers
    }

private:
    const Flash_fwd_params &params;
    const SplitkvPlan &plan;
    typename Traits::SharedStorage &shared;
    const VisibleKeys &keys;
    const int rows;  // of this row tile
    Softmax<2> softmax;
    float acc_o[kHeadDim / 8][4];
    int results_stage = 0;

    static constexpr int kVectors = kHeadDim / 4;

    // Four columns of a row, summed over the groups.
    __device__ __forceinline__ RowResult result_of_groups(int row, int column) const {
        RowResult result;
#pragma unroll
        for (int group = 0; group < Traits::kGroups; ++group) {
            result.row_max = fmaxf(result.row_max, shared.row_max[group][row]);
        }
#pragma unroll
        for (int group = 0; group < Traits::kGroups; ++group) {
            const float *o = results_of(group) + row * Traits::kOStride + column;
            result.add_weighted({shared.row_max[group][row], shared.row_sum[group][row]},
                                *reinterpret_cast<const float4 *>(o), params.scale_softmax_log2);
        }
        return result;
    }

    __device__ __forceinline__ void store_finished(int row, int column, const RowResult &result) const {
        const RowAt at = row_at(row);
        result.store<Element>(params, keys.bidb, at.bidh, at.query, column);
    }

    struct RowAt {
        int query, bidh;
    };
    // Row `row` of the tile.
    __device__ RowAt row_at(int row) const {
        int query, head;
        plan.by_ratio(query, head, blockIdx.x * plan.tile_rows + row);
        return {query, keys.bidh_k * params.h_h_k_ratio + head};
    }
    __device__ static int group() { return Traits::kIsOneGroup ? 0 : warp_index() / Traits::kGroupWarps; }
    // The first row of this warp, and row i (0 or 1) of this thread.
    __device__ static int row_of_warp() {
        return Traits::kGroupWarps == 1 ? 0 : warp_index() % Traits::kGroupWarps * kWarpRows;
    }
    __device__ static int row_of_thread(int i) {
        return row_of_warp() + i * 8 + static_cast<int>(threadIdx.x % 32) / 4;
    }

    // (row, col) of an accumulator [kColumns / 8][4].
    template <int kColumns>
    __device__ static auto rowcol(float (&acc)[kColumns / 8][4]) {
        using Layout = cute::Layout<Shape<_2, Shape<_2, Int<kColumns / 8>>>, Stride<_2, Stride<_1, _4>>>;
        return make_tensor(&acc[0][0], Layout{});
    }

    __device__ __forceinline__ Element *q_tile() const { return &shared.tiles[0][0][0][0] + kTilesElements; }
    static constexpr int kTilesElements = sizeof(shared.tiles) / sizeof(Element);

    template <typename WhileLoading, typename StartNext>
    __device__ __forceinline__ void loop(TileLoader<Traits> &loader, PipelineState &state,
                                         const WhileLoading &while_loading, const StartNext &start_next) {
        constexpr int kStages = Traits::kStages;
        const int group = this->group(), first_key = keys.begin + group * kKeys;
        const uint32_t tiles = static_cast<uint32_t>(__cvta_generic_to_shared(&shared.tiles[group]));
        const bool is_idle = row_of_warp() >= rows;
        const int tiles_of_group = max(keys.end - keys.begin + Traits::kRoundKeys - 1, 0) / Traits::kRoundKeys;
        uint32_t q[Traits::kQInRegisters ? kHeadDim / 16 : 1][4];
        // First the loads of kStages tiles begin, then tile i + kStages - 1 is loaded when tile i - 1 has been
        // multiplied.
#pragma unroll 1
        for (int i = state.loads - kStages; i < tiles_of_group; ++i) {
            if (i > 0) {
                cp_async_wait_group<kStages - 2>();
                sync_group(group);  // the tile is there for all threads, and all are done with the tile before
                if (Traits::kLoadsNextRun && i == max(tiles_of_group - kStages + 1, 1)) {
                    start_next();
                }
            }
            if (i != 0) {
                loader.load();
                if (i == -kStages && !state.has_queries) {
                    copy_rows();  // behind the keys, which come from farther away
                }
                cp_async_commit();
                if (i == -1) {
                    while_loading();
                }
            } else {
                if (Traits::kLoadsNextRun && state.has_queries) {
                    cp_async_wait_group<1>();  // at least one load follows Q
                } else {
                    cp_async_wait_group<kStages - 1>();
                }
                __syncthreads();  // Q, the rows' queries and slopes, and the first tile are there
                if constexpr (Traits::kQInRegisters) {
#pragma unroll
                    for (int k = 0; k < kHeadDim / 16; ++k) {
                        ldmatrix_x4(q[k], q_address(k));
                    }
                }
            }
            if (i >= 0) {
                const int key = first_key + i * Traits::kRoundKeys;
                if (!is_idle && key < keys.end) {
                    step(tiles + state.stage * 2 * Traits::kTileElements * sizeof(Element), q, key);
                }
                state.stage = state.stage + 1 == kStages ? 0 : state.stage + 1;
            }
        }
        if constexpr (Traits::kLoadsNextRun) {
            if (tiles_of_group == 0) {
                cp_async_wait_group<0>();  // the copy of the next rows must not overtake that of these
            }
            if (tiles_of_group < 2) {
                start_next();
            }
            state.loads = max(min(kStages, tiles_of_group) - 1, 0);
        }
    }

    __device__ __forceinline__ static void sync_group([[maybe_unused]] int group) {
        if constexpr (Traits::kIsOneGroup) {
            __syncthreads();
        } else if constexpr (Traits::kGroupWarps > 1) {
            named_barrier_sync(1 + group, Traits::kGroupWarps * 32);
        } else {
            __syncwarp();
        }
    }

    // One key tile: S = Q K^T, softmax, O += P V. tile: address of K in shared memory; V follows.
    template <typename Q>
    __device__ __forceinline__ void step(uint32_t tile, const Q &q, int first_key) {
        const int lane = threadIdx.x % 32;
        float acc_s[kKeys / 8][4] = {};
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
            uint32_t a[4];
            if constexpr (Traits::kQInRegisters) {
                a[0] = q[k][0], a[1] = q[k][1], a[2] = q[k][2], a[3] = q[k][3];
            } else {
                ldmatrix_x4(a, q_address(k));
            }
#pragma unroll
            for (int n = 0; n < kKeys / 16; ++n) {
                uint32_t b[4];
                ldmatrix_x4(b, tile + tile_offset(n * 16 + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
                mma_m16n8k16<Element>(acc_s[2 * n], a, b[0], b[1]);
                mma_m16n8k16<Element>(acc_s[2 * n + 1], a, b[2], b[3]);
            }
        }

        Tensor scores = rowcol<kKeys>(acc_s);
        modify_and_mask(scores, first_key);
        Tensor o = rowcol<kHeadDim>(acc_o);
        softmax.step(scores, o);

        const uint32_t tile_v = tile + Traits::kTileElements * sizeof(Element);
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k) {
            const auto &low = acc_s[2 * k], &high = acc_s[2 * k + 1];
            const uint32_t p[4] = {pack<Element>(low[0], low[1]), pack<Element>(low[2], low[3]),
                                   pack<Element>(high[0], high[1]), pack<Element>(high[2], high[3])};
#pragma unroll
            for (int n = 0; n < kHeadDim / 16; ++n) {
                uint32_t b[4];
                ldmatrix_x4_transposed(b, tile_v + tile_offset(k * 16 + lane % 16, 2 * n + lane / 16));
                mma_m16n8k16<Element>(acc_o[2 * n], p, b[0], b[1]);
                mma_m16n8k16<Element>(acc_o[2 * n + 1], p, b[2], b[3]);
            }
        }
    }

    __device__ __forceinline__ static int tile_offset(int row, int chunk) {
        return chunk_offset<kHeadDim, kKeys>(row, chunk);
    }

    // Score modifiers and the mask; the same arithmetic as ScoreMod::apply.
    template <typename TensorS>
    __device__ __forceinline__ void modify_and_mask(TensorS &scores, int first_key) const {
        const auto key_of = [&](int col) {
            return first_key + col / 2 * 8 + static_cast<int>(threadIdx.x % 4) * 2 + col % 2;
        };
        if (params.cap_scale != 0.0f) {
#pragma unroll
            for (int i = 0; i < size(scores); ++i) {
                scores(i) = tanh_approx(scores(i) * params.cap_scale);
            }
        }
        if (params.has_alibi()) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const auto [query, slope] = shared.rows[row_of_thread(row)];
                const int position = query + keys.sequence.seqlen_k - keys.sequence.seqlen_q;
#pragma unroll
                for (int col = 0; col < size<1>(scores); ++col) {
                    scores(row, col) -= slope * fabsf(float(position - key_of(col)));
                }
            }
        }
        if (first_key < keys.full_begin || first_key + kKeys > keys.full_end) {
            const KeyRange<true> range(params, keys.sequence.seqlen_q, keys.sequence.seqlen_k);
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const int query = shared.rows[row_of_thread(row)].query;
                const int begin_key = range.begin_key(query), end_key = min(range.end_key(query), keys.end);
#pragma unroll
                for (int col = 0; col < size<1>(scores); ++col) {
                    const bool is_visible = key_of(col) >= begin_key && key_of(col) < end_key;
                    scores(row, col) = is_visible ? scores(row, col) : -INFINITY;
                }
            }
        }
    }

    // ---- Q ----------------------------------------------------------------------------------------------------------

    __device__ __forceinline__ static int q_offset(int row, int chunk) {
        return row / kWarpRows * kWarpRows * kHeadDim * int(sizeof(Element)) +
               chunk_offset<kHeadDim, kWarpRows>(row % kWarpRows, chunk);
    }

    __device__ __forceinline__ uint32_t q_address(int k) const {
        const int lane = threadIdx.x % 32;
        return static_cast<uint32_t>(__cvta_generic_to_shared(q_tile())) +
               q_offset(row_of_warp() + lane % 16, 2 * k + lane / 16);
    }

    // ---- results ----------------------------------------------------------------------------------------------------

    // O of a group, [tile_rows][kOStride]; without kLoadsNextRun that of the next group follows.
    __device__ __forceinline__ float *results_of(int group) const {
        if constexpr (Traits::kLoadsNextRun) {
            return reinterpret_cast<float *>(&shared.tiles[group][results_stage]);
        } else {
            return reinterpret_cast<float *>(&shared.tiles) + group * plan.tile_rows * Traits::kOStride;
        }
    }

    __device__ __forceinline__ void store_results() {
        const int group = this->group();
        float *results = results_of(group);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const int at = row_of_thread(row);
            const float sum = quad_allreduce(softmax.row_sum[row], [](float a, float b) { return a + b; });
            if (threadIdx.x % 4 == 0) {
                shared.row_max[group][at] = softmax.row_max[row];
                shared.row_sum[group][at] = sum;
            }
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n) {
                *reinterpret_cast<float2 *>(results + at * Traits::kOStride + n * 8 + threadIdx.x % 4 * 2) =
                    make_float2(acc_o[n][2 * row], acc_o[n][2 * row + 1]);
            }
        }
    }
};

// The append kernel has waited for the kernel before it, so the lengths are there when it lets this kernel start.
__device__ __forceinline__ void wait_for_lengths(const SplitkvPlan &plan) {
    if (!plan.follows_append) {
        wait_for_previous_kernel();
    }
}

// The runs of keys of one CTA. Row tiles of the same keys are neighbours, so that they share the keys in L2.
template <typename Traits>
__device__ __forceinline__ void compute_attn_splitkv(const Flash_fwd_params &params, const SplitkvPlan &plan,
                                                     typename Traits::SharedStorage &shared) {
    wait_for_lengths(plan);
    const int heads = plan.heads_of_piece(params), piece = uniform(blockIdx.y / heads);
    const bool is_writer = threadIdx.x == 0 && blockIdx.x == 0;
    Runs runs(params, plan, piece, blockIdx.y - piece * heads);
    wait_for_previous_kernel();  // it may write keys and queries
    launch_dependents();
    if (runs.left <= 0) {
        if (is_writer) {
            runs.record_nothing();
        }
        return;
    }
    TileLoader<Traits> loader = RunOfKeys<Traits>::loader(params, plan, shared);
    PipelineState state;
    Runs::Run run, next_run;
    VisibleKeys keys, next_keys;
    bool has_next = false;
    const auto start_next = [&] {
        has_next = runs.left > 0;
        if (has_next) {
            const Sequence sequence = cache_sequence(params, runs.at.bidb);
            next_run = runs.next(sequence);
            next_keys = VisibleKeys(params, plan, sequence, next_run.bidb, next_run.bidh_k, next_run.first_key,
                                    next_run.end_key);
            loader.start(KeySource<Traits>(params, sequence, next_run.bidb, next_run.bidh_k), next_keys.begin,
                         next_keys.end);
        }
    };
    start_next();
#pragma unroll 1
    while (has_next) {
        run = next_run;
        keys = next_keys;
        RunOfKeys<Traits> of_run(params, plan, shared, keys);
        const auto record = [&] {
            if (is_writer) {
                runs.record(run);
            }
        };
        of_run.compute(loader, state, record, start_next);
        if constexpr (Traits::kLoadsNextRun) {
            state.has_queries = true;
            if (has_next) {
                RunOfKeys<Traits>(params, plan, shared, next_keys).copy_rows();
                cp_async_commit();
            }
        }
        of_run.store(run.slot);
        __syncthreads();  // the results are read: key tiles may take their place
        if constexpr (!Traits::kLoadsNextRun) {
            start_next();
        }
    }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kMaxThreads, Traits::kMinCtas)
    flash_fwd_splitkv_kernel(const __grid_constant__ Flash_fwd_params params,
                             const __grid_constant__ SplitkvPlan plan) {
    extern __shared__ __align__(128) char smem[];
    compute_attn_splitkv<Traits>(params, plan, *reinterpret_cast<typename Traits::SharedStorage *>(smem));
}

// A cluster of CTAs works on the keys of one head, so that no second kernel has to combine the results.
template <typename Traits>
__global__ void __launch_bounds__(Traits::kMaxThreads, Traits::kMinCtas)
    flash_fwd_splitkv_cluster_kernel(const __grid_constant__ Flash_fwd_params params,
                                     const __grid_constant__ SplitkvPlan plan) {
#ifdef FLASH_HAS_CLUSTERS
    extern __shared__ __align__(128) char smem[];
    const int rank = blockIdx.y % plan.cluster, head = blockIdx.y / plan.cluster;
    const int bidb = head / params.h_k, bidh_k = head % params.h_k;
    wait_for_lengths(plan);
    const Sequence seq = cache_sequence(params, bidb);
    const Units units(params, plan, seq);
    const int units_of_cta = units.count / plan.cluster, longer_ctas = units.count - units_of_cta * plan.cluster;
    const int begin = rank * units_of_cta + min(rank, longer_ctas);
    const int end = begin + units_of_cta + (rank < longer_ctas);
    wait_for_previous_kernel();  // it may write keys and queries
    launch_dependents();
    auto &shared = *reinterpret_cast<typename Traits::SharedStorage *>(smem);
    const VisibleKeys keys(params, plan, seq, bidb, bidh_k, units.first_key(begin), units.first_key(end));
    TileLoader<Traits> loader = RunOfKeys<Traits>::loader(params, plan, shared);
    loader.start(KeySource<Traits>(params, seq, bidb, bidh_k), keys.begin, keys.end);
    PipelineState state;
    RunOfKeys<Traits> run(params, plan, shared, keys);
    run.compute(loader, state, [] {}, [] {});
    run.store_as_cluster(rank, plan.cluster);
#endif
}

}  // namespace flash::kvcache
