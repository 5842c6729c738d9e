// The producer warpgroup of the backward: loads, and dQ added to the accumulator.
#pragma once

#include "consumer_bwd.h"
#include "cta_pair_bwd.h"
#include "dq_tile.h"
#include "kernel_traits_bwd.h"
#include "steps_bwd.h"

namespace flash::sm90 {

// ---- loads. TMA copies K and V of a key block once, and Q and dO of every step, into shared memory. The row
// statistics come with them.
//
// Rows of Q and dO that belong to another sequence, or see no key, are out of bounds. They become zeros before a
// consumer reads them, because NaN times 0 is NaN. Only the kinds varlen, general and ranged have them: where lengths
// are equal, TMA fills rows past the end with zeros, and calls with rows that see no key are of kind varlen
// (choose_kernel.h). With attn_bias, preprocess finds the rows that see no key.

// What the load warp keeps from one key block of its work tile to the next.
template <typename Traits>
struct LoaderStates {
    PipelineState<1> kv;
    PipelineState<Traits::kStagesQ> q;
    PipelineState<Traits::kStagesdO> dout;
    uint32_t oob_phase = 0;
    bool has_statistics = false;  // a step was loaded, and so preprocess has written the row statistics
};

// Warp 0 of the producer warpgroup, and warp 3 for load_first_statistics().
template <typename Traits, Kind kKind>
class LoaderBwd {
public:
    // A warp of its own waits for the row statistics of the first step and copies them: the load warp would do so only
    // behind the other copies.
    static constexpr bool kHasStatisticsWarp = Traits::kConsumersComputeDq && !is_general(kKind);

    __device__ LoaderBwd(const Flash_bwd_params &params, const typename Traits::Copies &copies,
                         typename Traits::SharedStorage &shared, const ColumnBlock<Traits, kKind> &block,
                         LoaderStates<Traits> &states)
        : params(params),
          copies(copies),
          shared(shared),
          block(block),
          step(block),
          steps_left(block.num_steps()),
          states(states),
          q_state(states.q),
          dout_state(states.dout) {
        bidb_q = params.cu_seqlens_q != nullptr && may_be_varlen(kKind) ? 0 : block.bidb;
    }

    // All loads of the key block. Behind another one, Q and dO of the first step come first: K and V wait until the
    // consumers have finished with those of the key block before.
    template <typename Wait>
    __device__ __forceinline__ void load(const Wait &wait_for_statistics) {
        if (may_group_key_blocks<Traits, kKind>() && steps_left == 0) {
            skip_KV();
        } else if (may_group_key_blocks<Traits, kKind>() && states.has_statistics) {
            load_next();
            load_KV<typename Traits::TilesQK>(copies.k, shared.k, shared.k_barriers);
            load_KV<typename Traits::TilesdOV>(copies.v, shared.v, shared.v_barriers);
        } else {
            load_first(wait_for_statistics);
        }
        load_rest();
        states.kv.advance();
    }

    // K and V, and the steps for which there are stages. S is multiplied first, so K and Q come first. Without
    // kHasStatisticsWarp the row statistics of the first step come last: wait_for_statistics() returns when preprocess
    // has written them.
    template <typename Wait>
    __device__ __forceinline__ void load_first(const Wait &wait_for_statistics) {
        if (steps_left == 0) {  // nobody would wait for the copies, and a CTA must not end before they do
            return;
        }
        states.has_statistics = true;
        if (has_bias(kKind)) {  // they tell which rows see no key
            wait_for_statistics();
        }
        load_KV<typename Traits::TilesQK>(copies.k, shared.k, shared.k_barriers);
        read_visible_keys();
        copy_Q();
        load_KV<typename Traits::TilesdOV>(copies.v, shared.v, shared.v_barriers);
        copy_dO();
        if (kHasStatisticsWarp) {
            complete_step();
            wait_for_statistics();
        } else {
            if (!has_bias(kKind)) {
                wait_for_statistics();
            }
            copy_lse();
            copy_delta();
            complete_step();
        }
        CUTE_NO_UNROLL
        for (int i = 1; i < cute::min(Traits::kStagesQ, Traits::kStagesdO) - 1; ++i) {
            load_next();
        }
    }

    // The row statistics of the first step. Returns false if the key block has no steps.
    template <typename Wait>
    __device__ __forceinline__ bool load_first_statistics(const Wait &wait_for_statistics) {
        if (steps_left == 0) {
            return false;
        }
        wait_for_statistics();
        copy_lse();
        copy_delta();
        return true;
    }

    // One more step, if any is left. Waits for its stages.
    __device__ __forceinline__ void load_next() {
        if (steps_left > 0) {
            read_visible_keys();
            q_state.acquire(shared.q_barriers);
            copy_Q();
            copy_lse();
            dout_state.acquire(shared.dout_barriers);
            copy_dO();
            copy_delta();
            complete_step();
        }
    }

    // Loads Q or dO of one more step, if any is left and their stages are empty. Does not wait for stages. Of a step
    // with rows out of bounds it waits for the copies.
    __device__ __forceinline__ void load_if_empty() {
        if (steps_left == 0) {
            return;
        }
        if (!has_loaded_Q && q_state.is_empty(shared.q_barriers)) {
            read_visible_keys();
            copy_Q();
            copy_lse();
            has_loaded_Q = true;
        }
        if (has_loaded_Q && dout_state.is_empty(shared.dout_barriers)) {
            copy_dO();
            copy_delta();
            complete_step();
            has_loaded_Q = false;
        }
    }

    // A pair of CTAs: the columns of K that this one multiplies with dS, of the other one's keys.
    __device__ __forceinline__ void load_K_of_peer(int rank) {
        if (block.num_steps() > 0 && cute::elect_one_sync()) {
            constexpr int kBytes = size(typename Traits::TileOfHalf{}) * sizeof(Element);
            load_rows(copies.k, typename Traits::TileOfHalf{},
                      make_tensor(make_smem_ptr(shared.k_of_peer), typename Traits::SmemLayoutHalf{}), 0,
                      PipelineState<1>().expect(shared.k_of_peer_barriers, kBytes),
                      first_row_of_K() + (1 - rank) * Traits::kKeysOfCta, head_of_K(),
                      may_be_varlen(kKind) ? block.k_bidb : block.bidb, rank * Traits::kColumnsOfCta);
        }
    }

    __device__ __forceinline__ void load_rest() {
        while (steps_left > 0) {
            load_next();
        }
    }

private:
    using Element = typename Traits::Element;
    using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;
    static constexpr int kBlockM = Traits::kBlockM;
    static constexpr int kBytesOfRows = kBlockM * sizeof(float);
    const Flash_bwd_params &params;
    const typename Traits::Copies &copies;
    typename Traits::SharedStorage &shared;
    const ColumnBlock<Traits, kKind> &block;
    Step step;
    int steps_left, bidb_q;
    LoaderStates<Traits> &states;
    VisibleBlock visible;               // key_ranges: of the step
    bool has_rows_without_key = false;  // attn_bias: the step
    bool has_loaded_Q = false;          // load_if_empty: Q of the step
    PipelineState<Traits::kStagesQ> &q_state;
    PipelineState<Traits::kStagesdO> &dout_state;

    // A key block without steps: consumers find its K and V full, but read nothing.
    __device__ __forceinline__ void skip_KV() {
        states.kv.acquire(shared.k_barriers);
        states.kv.acquire(shared.v_barriers);
        if (cute::elect_one_sync()) {
            shared.k_barriers.full[0].arrive();
            shared.v_barriers.full[0].arrive();
        }
    }

    // All copies of the step are in flight.
    __device__ __forceinline__ void complete_step() {
        if (has_oob_rows()) {
            clear_oob_rows();
        }
        step.advance(block);
        q_state.advance();
        dout_state.advance();
        --steps_left;
    }

    template <typename Tiles>
    __device__ __forceinline__ void load_KV(const typename Tiles::TmaKV &tma, Element *smem,
                                            PipelineBarriers<1> &barriers) {
        constexpr int kBytes = Traits::kKeysOfCta * Tiles::kColumns * sizeof(Element);
        const int head = head_of_K();
        if (may_group_key_blocks<Traits, kKind>()) {
            states.kv.acquire(barriers);
        }
        if (cute::elect_one_sync()) {
            uint64_t &barrier = states.kv.expect(barriers, kBytes);
            load_rows(tma, typename Tiles::TileKV{}, make_tensor(make_smem_ptr(smem), typename Tiles::SmemLayoutKV{}),
                      0, barrier, first_row_of_K() + rank_in_cluster<Traits>() * Traits::kKeysOfCta, head,
                      may_be_varlen(kKind) ? block.k_bidb : block.bidb);
        }
    }
    __device__ __forceinline__ int first_row_of_K() const { return block.k_begin + block.first_key(); }
    __device__ __forceinline__ int head_of_K() const {
        return params.h_h_k_ratio == 1 ? block.bidh : block.bidh / params.h_h_k_ratio;  // a division is slow
    }

    // key_ranges: reads what the step's rows see, once for each step.
    __device__ __forceinline__ void read_visible_keys() {
        if constexpr (has_ranges(kKind)) {
            const int first_row = step.m_block * kBlockM;
            const RangesOfHead ranges(params, block.bidb, block.bidh + step.head);
            visible = ranges.template block<kBlockM>(first_row, block.seqlen_q);
            ranges.prefetch(first_row, kBlockM, block.seqlen_q);  // for the consumers
        }
        if constexpr (has_bias(kKind)) {
            has_rows_without_key = (params.large_rows[step.padded_row(params, block) / kBlockM] & kRowsWithoutKey) != 0;
        }
    }

    // key_ranges: tells each consumer whether the step needs a mask. The arrival of the same lane comes after it.
    __device__ __forceinline__ void store_is_masked() {
        if constexpr (has_ranges(kKind)) {
            CUTE_UNROLL
            for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
                const int begin = block.first_key() + first_key_of_consumer<Traits>(consumer);
                shared.is_masked[q_state.stage][consumer] = !visible.sees_all(begin, begin + Traits::kKeys);
            }
        }
    }

    __device__ __forceinline__ bool has_oob_rows() const {
        const int first_row = step.m_block * kBlockM;
        if constexpr (has_ranges(kKind)) {
            return visible.has_row_without_key() || first_row + kBlockM > block.seqlen_q;
        } else if constexpr (has_bias(kKind)) {
            return has_rows_without_key;
        } else {
            return has_oob_rows_of_mask(first_row);
        }
    }
    __device__ __forceinline__ bool has_oob_rows_of_mask(int first_row) const {
        return may_be_varlen(kKind) && (first_row < block.begin_row() || first_row + kBlockM > block.end_row());
    }

    // The copies of a step with rows out of bounds complete oob_copy_barrier. When they have come, the load warp writes
    // the zeros, and only then are the stages of Q and dO full. Without key_ranges few steps have such rows: the last
    // ones of a sequence, and the first ones if their queries see no key. They are loaded while the consumers work on
    // the step before.
    __device__ __forceinline__ void clear_oob_rows() {
        const int first_row = step.m_block * kBlockM;
        shared.oob_copy_barrier.wait(states.oob_phase);
        states.oob_phase ^= 1;
        if constexpr (has_ranges(kKind)) {
            const RowsWithKeys rows{RangesOfHead(params, block.bidb, block.bidh + step.head), first_row,
                                    block.seqlen_q};
            clear_rows_unless([&](int row) { return rows.contains(row); });
        } else if constexpr (has_bias(kKind)) {
            const float *lse = params.lse_padded + step.padded_row(params, block);
            clear_rows_unless([&](int row) { return lse[row] != INFINITY; });
        } else {
            const int begin = clamp_to(block.begin_row() - first_row, 0, kBlockM);
            clear_rows(0, begin);
            clear_rows(clamp_to(block.end_row() - first_row, begin, kBlockM), kBlockM);
        }
        cutlass::arch::fence_view_async_shared();  // before wgmma reads them
        __syncwarp();
        if (cute::elect_one_sync()) {
            shared.q_barriers.full[q_state.stage].arrive();
            shared.dout_barriers.full[dout_state.stage].arrive();
        }
    }

    __device__ __forceinline__ Element *tile_of_Q() const {
        return shared.q + q_state.stage * (kBlockM * Traits::kHeadDim);
    }
    __device__ __forceinline__ Element *tile_of_dO() const {
        return shared.dout + dout_state.stage * (kBlockM * Traits::kHeadDimV);
    }

    // The rows [begin, end) of Q and dO become zeros.
    __device__ __forceinline__ void clear_rows(int begin, int end) const {
        constexpr int kVectors = Traits::kSmemRow / 8;  // of a line
        const auto clear = [&](Element *tile, int columns) {
            CUTE_UNROLL
            for (int column = 0; column < columns; column += Traits::kSmemRow) {
                auto *lines = reinterpret_cast<uint4 *>(tile + Traits::line_of_row(0, column));
                CUTE_NO_UNROLL
                for (int i = begin * kVectors + threadIdx.x % 32; i < end * kVectors; i += 32) {
                    lines[i] = {};
                }
            }
        };
        clear(tile_of_Q(), Traits::kHeadDim);
        clear(tile_of_dO(), Traits::kHeadDimV);
    }

    // The rows of Q and dO that keeps(row) does not keep become zeros.
    template <typename Keeps>
    __device__ __forceinline__ void clear_rows_unless(const Keeps &keeps) const {
        constexpr int kVectors = Traits::kHeadDim / 8;
        CUTE_NO_UNROLL
        for (int i = threadIdx.x % 32; i < kBlockM * kVectors; i += 32) {
            const int row = i / kVectors, column = i % kVectors * 8;
            if (!keeps(row)) {
                const int place = Traits::line_of_row(row, column) + column % Traits::kSmemRow;
                *reinterpret_cast<uint4 *>(tile_of_Q() + place) = {};
                if (column < Traits::kHeadDimV) {
                    *reinterpret_cast<uint4 *>(tile_of_dO() + place) = {};
                }
            }
        }
    }

    __device__ __forceinline__ void copy_Q() {
        copy_tile<typename Traits::TilesQK>(q_state, copies.q, shared.q, barrier_of(q_state, shared.q_barriers));
    }
    __device__ __forceinline__ void copy_lse() {
        copy_rows<typename Traits::TilesQK>(params.lse_padded, shared.lse[q_state.stage],
                                            barrier_of(q_state, shared.q_barriers), [&] { store_is_masked(); });
    }
    __device__ __forceinline__ void copy_dO() {
        copy_tile<typename Traits::TilesdOV>(dout_state, copies.dout, shared.dout,
                                             barrier_of(dout_state, shared.dout_barriers));
    }
    __device__ __forceinline__ void copy_delta() {
        copy_rows<typename Traits::TilesdOV>(static_cast<const float *>(params.dsoftmax_sum),
                                             shared.delta[dout_state.stage],
                                             barrier_of(dout_state, shared.dout_barriers), [] {});
    }

    // The barrier that the copies of the step complete.
    template <int kStages>
    __device__ __forceinline__ TransactionBarrier &barrier_of(const PipelineState<kStages> &state,
                                                              PipelineBarriers<kStages> &barriers) const {
        return has_oob_rows() ? shared.oob_copy_barrier : barriers.full[state.stage];
    }

    // A tile of Q or dO. copy_rows() announces its bytes: the barrier completes when it has done so and all have come.
    template <typename Tiles, int kStages>
    __device__ __forceinline__ void copy_tile(const PipelineState<kStages> &state, const typename Tiles::TmaQ &tma,
                                              Element *smem, TransactionBarrier &barrier) {
        if (cute::elect_one_sync()) {
            const int first_row = block.q_begin + step.m_block * kBlockM;
            auto &completed = reinterpret_cast<uint64_t &>(barrier);
            if constexpr (multicasts<Traits, kKind>()) {
                const int rank = rank_in_cluster<Traits>();
                Element *half = smem + (state.stage * Traits::kCtas + rank) * size(typename Traits::TileOfHalf{});
                load_rows(tma, typename Traits::TileOfHalf{},
                          make_tensor(make_smem_ptr(half), typename Traits::SmemLayoutHalf{}), 0, completed, first_row,
                          block.bidh + step.head, bidb_q, rank * Traits::kColumnsOfCta, /*ctas=*/0b11);
            } else {
                load_rows(tma, typename Tiles::TileQ{},
                          make_tensor(make_smem_ptr(smem), typename Tiles::template SmemLayoutQ<kStages>{}),
                          state.stage, completed, first_row, block.bidh + step.head, bidb_q, /*first_column=*/0,
                          /*ctas=*/static_cast<uint16_t>(1 << rank_in_cluster<Traits>()));
            }
        }
    }

    // The row statistic of the tile. One lane calls before_arrival() before it arrives at the barrier.
    template <typename Tiles, typename BeforeArrival>
    __device__ __forceinline__ void copy_rows(const float *statistic, float *smem_statistic,
                                              TransactionBarrier &barrier, const BeforeArrival &before_arrival) {
        if (cute::elect_one_sync()) {
            before_arrival();
            constexpr int kBytesOfTile = kBlockM * Tiles::kColumns * sizeof(Element);
            barrier.arrive_and_expect_tx(kBytesOfTile + kBytesOfRows);
            SM90_BULK_COPY_G2S::copy(statistic + step.padded_row(params, block), &reinterpret_cast<uint64_t &>(barrier),
                                     smem_statistic, kBytesOfRows);
        }
    }
};

// ---- dQ, added to the float32 accumulator in global memory: by the copy engine for DqBy::consumers, else from the
// registers of the producer warpgroup, in a CTA or in a pair of CTAs

// DqBy::consumers. Warp 1 + c adds what consumer c puts into shared memory, by the copy engine.
template <typename Traits, Kind kKind>
class CopyProducer {
    using Block = ColumnBlock<Traits, kKind>;
    const Flash_bwd_params &params;
    const typename Traits::Copies &copies;
    typename Traits::SharedStorage &shared;

public:
    static constexpr int kWarpsThatAdd = Traits::kConsumers;

    __device__ CopyProducer(const Flash_bwd_params &params, const typename Traits::Copies &copies,
                            typename Traits::SharedStorage &shared)
        : params(params), copies(copies), shared(shared) {}

    // for_each_key_block(f) calls f(block) for the key blocks of the work tile. Calls done() in one thread of each warp
    // that adds, when its sums are written.
    template <typename ForEach, typename Wait, typename Done>
    __device__ __forceinline__ void run(const ForEach &for_each_key_block, const Wait &wait_for_statistics,
                                        const Done &done) const {
        const int warp = uniform(threadIdx.x / 32);
        if (warp == 0) {
            LoaderStates<Traits> states;
            for_each_key_block([&](const Block &block) {
                LoaderBwd<Traits, kKind>(params, copies, shared, block, states).load(wait_for_statistics);
            });
        } else if (warp <= kWarpsThatAdd) {
            PipelineState<1> state;  // of all its tiles
            for_each_key_block([&](const Block &block) { add(block, warp - 1, state); });
            if (threadIdx.x % 32 == 0) {
                // Completion is a fence from the async proxy to the generic proxy.
                asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
                done();
            }
        } else if constexpr (LoaderBwd<Traits, kKind>::kHasStatisticsWarp) {
            LoaderStates<Traits> states;
            bool is_done = false;
            for_each_key_block([&](const Block &block) {
                if (!is_done) {
                    is_done = LoaderBwd<Traits, kKind>(params, copies, shared, block, states)
                                  .load_first_statistics(wait_for_statistics);
                }
            });
        }
    }

private:
    // consumer: whose tiles the warp adds, in the order in which they come.
    __device__ __forceinline__ void add(const Block &block, int consumer, PipelineState<1> &state) const {
        const DqOrder<Traits, /*kCopyEngine=*/true, Block> order(params, block, consumer),
            order_of_last(params, block, Traits::kConsumers);
        Step step(block);
        for (int steps_left = block.num_steps(); steps_left > 0; --steps_left) {
            add_tile(block, state, step, consumer, order);
            if constexpr (Traits::kTilesOfDq > Traits::kConsumers) {
                if (DqTile<Traits>::consumer_in_turn(step) == consumer) {
                    add_tile(block, state, step, Traits::kConsumers, order_of_last);
                }
            }
            state.advance();
            step.advance(block);
        }
    }

    template <typename Order>
    __device__ __forceinline__ void add_tile(const Block &block, const PipelineState<1> &state, const Step &step,
                                             int tile, const Order &order) const {
        state.wait(shared.dq_barriers[tile]);
        if (params.dq_accum != nullptr) {
            order.wait(step);
            if (threadIdx.x % 32 == 0) {
                fence_copies_from_global();  // preprocess has written zeros there
                asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                                 DqTile<Traits>::target(params, block, step, tile)),
                             "r"(cute::cast_smem_ptr_to_uint(shared.dq[tile])), "n"(Traits::kTileOfDq * sizeof(float))
                             : "memory");
                asm volatile("cp.async.bulk.commit_group;" ::: "memory");
                asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // shared memory has been read
            }
            order.pass(step);
            __syncwarp();
        }
        if (threadIdx.x % 32 == 0) {
            shared.dq_barriers[tile].empty[0].arrive();
        }
    }
};

// DqBy::producer. All four warps multiply dQ, and add it from registers.
template <typename Traits, Kind kKind>
class RegisterProducer {
protected:
    using Block = ColumnBlock<Traits, kKind>;
    using Tile = DqTile<Traits>;
    const Flash_bwd_params &params;
    const typename Traits::Copies &copies;
    typename Traits::SharedStorage &shared;
    const int warp;

    // Calls work_on(block) for the key blocks of the work tile, then done() in one thread of each warp.
    template <typename ForEach, typename WorkOn, typename Done>
    __device__ __forceinline__ static void run(const ForEach &for_each_key_block, const WorkOn &work_on,
                                               const Done &done) {
        for_each_key_block(work_on);
        __syncwarp();  // one lane's release covers what the others added
        if (threadIdx.x % 32 == 0) {
            done();
        }
    }

public:
    static constexpr int kWarpsThatAdd = 4;

    __device__ RegisterProducer(const Flash_bwd_params &params, const typename Traits::Copies &copies,
                                typename Traits::SharedStorage &shared)
        : params(params), copies(copies), shared(shared), warp(uniform(threadIdx.x / 32)) {}
};

// The producer of a CTA without a peer.
template <typename Traits, Kind kKind>
class DqProducer : RegisterProducer<Traits, kKind> {
    using Base = RegisterProducer<Traits, kKind>;
    using Base::params, Base::copies, Base::shared, Base::warp;
    using typename Base::Block, typename Base::Tile;
    PipelineState<Traits::kStagesdS> state;

public:
    using Base::Base, Base::kWarpsThatAdd;

    // The arguments are those of CopyProducer::run.
    template <typename ForEach, typename Wait, typename Done>
    __device__ __forceinline__ void run(const ForEach &for_each_key_block, const Wait &wait_for_statistics,
                                        const Done &done) {
        Base::run(
            for_each_key_block,
            [&](const Block &block) __attribute__((always_inline)) { run(block, wait_for_statistics); }, done);
    }

private:
    template <typename Wait>
    __device__ __forceinline__ void run(const Block &block, const Wait &wait_for_statistics) {
        LoaderStates<Traits> states;
        LoaderBwd<Traits, kKind> loader(params, copies, shared, block, states);
        if (warp == 0) {
            loader.load_first(wait_for_statistics);
        }
        int steps_left = block.num_steps();
        if (steps_left > 0) {
            PipelineState<1>().wait(shared.k_barriers);
        }
        // Deterministic: the wait for the CTA before takes as long as a load from the L2 cache, so it precedes the wait
        // for dS. The pass takes until all sums are written, so it comes a step later.
        const DqOrder<Traits, /*kCopyEngine=*/false, Block> order(params, block, warp);
        Step step(block), added = step;
        for (bool has_added = false; steps_left > 0; --steps_left, has_added = true) {
            if (warp == 0) {
                loader.load_next();
            }
            if (params.dq_accum != nullptr) {
                order.wait(step);
            }
            state.wait(shared.ds_barriers);
            if (params.dq_accum != nullptr) {
                if (has_added) {
                    order.pass(added);
                }
                add(block, step);
            } else {
                state.release(shared.ds_barriers);
            }
            state.advance();
            added = step;
            step.advance(block);
        }
        if (params.dq_accum != nullptr && block.num_steps() > 0) {
            order.pass(added);
        }
    }

    __device__ __forceinline__ void add(const Block &block, const Step &step) const {
        // The loop is not unrolled: its addresses would take more registers than the warpgroup has.
        CUTE_NO_UNROLL
        for (int tile = 0; tile < Traits::kTilesOfDq; ++tile) {
            auto acc = Tile::accumulator();
            if constexpr (Traits::kHasManyDescriptors) {
                Tile::issue(shared, uniform(state.stage), uniform(tile), acc);
            } else {
                Tile::issue(shared, state.stage, tile, acc);
            }
            wait_for<0>(acc);
            if (tile == Traits::kTilesOfDq - 1) {
                state.release(shared.ds_barriers);
            }
            Tile::add(Tile::target(params, block, step, tile), acc);
        }
    }
};

// The producer of a CTA of a pair, which multiplies the CTA's columns of dQ.
template <typename Traits, Kind kKind>
class PairProducer : RegisterProducer<Traits, kKind> {
    using Base = RegisterProducer<Traits, kKind>;
    using Base::params, Base::copies, Base::shared, Base::warp;
    using typename Base::Block, typename Base::Tile;
    using Loader = LoaderBwd<Traits, kKind>;
    const ExchangeOfDs<Traits> exchange{shared};

public:
    using Base::Base, Base::kWarpsThatAdd;

    // The arguments are those of CopyProducer::run.
    template <typename ForEach, typename Wait, typename Done>
    __device__ __forceinline__ void run(const ForEach &for_each_key_block, const Wait &wait_for_statistics,
                                        const Done &done) {
        Base::run(
            for_each_key_block,
            [&](const Block &block) __attribute__((always_inline)) { run(block, wait_for_statistics); }, done);
    }

private:
    template <typename Wait>
    __device__ __forceinline__ void run(const Block &block, const Wait &wait_for_statistics) {
        LoaderStates<Traits> states;
        Loader loader(params, copies, shared, block, states);
        if (warp == 0) {
            loader.load_first(wait_for_statistics);
            loader.load_K_of_peer(exchange.rank);
        }
        int steps_left = block.num_steps();
        if (steps_left > 0) {
            PipelineState<1>().wait(shared.k_barriers);
            PipelineState<1>().wait(shared.k_of_peer_barriers);
            clear_oob_keys_of_peer(block);
        }
        PipelineState<Traits::kStagesdS> state;
        for (Step step(block); steps_left > 0; --steps_left) {
            wait_loading(loader, shared.ds_barriers.full[state.stage], state.phase);
            if (warp == 1) {
                exchange.send(state);
            }
            auto acc = Tile::accumulator();
            const int stage = uniform(state.stage);
            Tile::issue_part(/*of_peer=*/false, shared, stage, exchange.rank, acc);
            wait_loading(loader, shared.ds_of_peer_full[state.stage], state.phase);
            Tile::issue_part(/*of_peer=*/true, shared, stage, exchange.rank, acc);
            wait_for<0>(acc);
            exchange.release(state);
            Tile::add(Tile::target(params, block, step, exchange.rank), acc);
            state.advance();
            step.advance(block);
        }
    }

    // The load warp loads what it can while it waits.
    __device__ __forceinline__ void wait_loading(Loader &loader, const cutlass::arch::ClusterBarrier &barrier,
                                                 uint32_t phase) const {
        if (warp != 0) {
            barrier.wait(phase);
            return;
        }
        while (!__all_sync(0xffffffffu, barrier.test_wait(phase))) {
            loader.load_if_empty();
        }
    }

    // Like clear_oob_keys().
    __device__ __forceinline__ void clear_oob_keys_of_peer(const Block &block) const {
        const int rows = block.seqlen_k - block.first_key() - exchange.peer * Traits::kKeysOfCta;
        if (may_be_varlen(kKind) && rows < Traits::kKeysOfCta) {
            Tensor sK = make_tensor(make_smem_ptr(shared.k_of_peer), take<0, 2>(typename Traits::SmemLayoutHalf{}));
            clear_rows_from(rows, sK, /*warpgroup=*/Traits::kConsumers);
        }
    }
};

}  // namespace flash::sm90
