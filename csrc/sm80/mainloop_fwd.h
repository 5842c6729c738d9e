// The loop over key blocks for one block of query rows: S = Q K^T on tensor cores, online softmax, O += P V. cp.async
// loads K and V one product ahead. Called by compute_attn_1rowblock; leaves O in registers.
#pragma once

#include "../common/block_info.h"
#include "../common/dropout.h"
#include "../common/score_mod.h"
#include "../common/softmax.h"
#include "copy.h"
#include "kernel_traits.h"
#include "layout.h"
#include "mask.h"

namespace flash::sm80 {

template <typename Traits, Kind kKind>
class MainloopFwd {
    using Element = typename Traits::Element;
    using SharedStorage = typename Traits::SharedStorage;
    using Info = BlockInfo<Traits::kBlockM, Traits::kBlockN, is_local(kKind)>;
    using TiledMma = typename Traits::TiledMma;
    using LdMatrix = typename Traits::SmemCopyAtom;
    using LdMatrixTransposed = typename Traits::SmemCopyAtomTransposed;

    static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
    static constexpr bool kRecomputesAddresses = Traits::TileSize::kRecomputesAddresses;
    static constexpr int kQSteps = Traits::TileSize::kQStepsInRegisters;

    using TileQ = Shape<Int<kBlockM>, Int<kHeadDim>>;
    using TileKV = Shape<Int<kBlockN>, Int<kHeadDim>>;
    using TileS = Shape<Int<kBlockM>, Int<kBlockN>>;
    using KeyBlocks = decltype(local_tile(head_tensor<Element>(TensorRef{}, 0, 0, 0, 0, 0), TileKV{},
                                          make_coord(_, 0)));  // (BLK_N, HD, n)

public:
    __device__ MainloopFwd(const Flash_fwd_params &params, const Info &info, SharedStorage &shared, int bidb, int bidh,
                           int m_block)
        : params(params),
          info(info),
          shared(shared),
          bidb(bidb),
          bidh(bidh),
          bidh_k(bidh / params.h_h_k_ratio),
          m_block(m_block),
          gK(key_blocks_of(params.k)),
          gV(key_blocks_of(params.v)) {
        Tensor coords = thread_copy(threadIdx.x).partition_S(make_identity_tensor(TileQ{}));
        CUTE_UNROLL
        for (int col = 0; col < size(column_in_range); ++col) {
            column_in_range(col) = get<1>(coords(0, 0, col)) < params.d;
        }
    }

    // acc_o (MMA, MMA_M, MMA_K) gets the unnormalised output, softmax its row statistics. There is at least one key
    // block. They are visited from the last one down, so that the steps with a mask come first.
    template <typename TensorO, typename SoftmaxState>
    __device__ __forceinline__ void run(TensorO &acc_o, SoftmaxState &softmax) {
        load_q();
        int n_block = info.n_block_max - 1;
        load_kv(params.k, gK, shared.k, n_block);
        read_q();
        for (; n_block >= info.n_block_min; --n_block) {
            step(n_block, acc_o, softmax);
        }
    }

private:
    const Flash_fwd_params &params;
    const Info &info;
    SharedStorage &shared;
    const int bidb, bidh, bidh_k, m_block;
    const KeyBlocks gK, gV;
    decltype(make_tensor<bool>(Int<kHeadDim / Traits::kSmemRow>{})) column_in_range;
    // Q: (MMA, MMA_M, MMA_K); the first kQSteps slices stay here over the loop.
    decltype(TiledMma{}.get_thread_slice(0).partition_fragment_A(
        make_tensor(make_smem_ptr(static_cast<Element *>(nullptr)), typename Traits::SmemLayoutQ{}))) tSrQ;

    // One key block. On entry K(n_block) is on its way and no thread reads the buffer of V any more.
    template <typename TensorO, typename SoftmaxState>
    __device__ __forceinline__ void step(int n_block, TensorO &acc_o, SoftmaxState &softmax) {
        cp_async_wait<0>();
        __syncthreads();  // all threads: K has arrived, the product with the V before is done
        load_kv(params.v, gV, shared.v, n_block);
        Tensor acc_s = partition_fragment_C(TiledMma{}, TileS{});  // (MMA, MMA_M, MMA_N)
        multiply_qk(acc_s);
        cp_async_wait<0>();
        __syncthreads();  // all threads: V has arrived, the product with K is done
        if (n_block > info.n_block_min) {
            load_kv(params.k, gK, shared.k, n_block - 1);
        }
        Tensor scores = make_tensor(acc_s.data(), rowcol_layout(acc_s.layout()));        // (row, col)
        Tensor acc_o_rowcol = make_tensor(acc_o.data(), rowcol_layout(acc_o.layout()));  // (row, col)
        modify_scores(scores, n_block);
        if (info.needs_mask(n_block)) {
            apply_mask<kBlockM, kBlockN>(scores, coords_of_scores(thread_index<true>()), info, m_block, n_block);
        }
        softmax.step(scores, acc_o_rowcol);
        drop_probabilities(scores, n_block);
        multiply_pv(acc_s, acc_o);
    }

    // ---- Loads ----

    __device__ static auto thread_copy(int thread) {
        return typename Traits::GmemTiledCopyQKV{}.get_thread_slice(thread);
    }

    __device__ __forceinline__ void load_q() {
        Tensor mQ = head_tensor<Element>(params.q, bidb, bidh, info.q_begin, info.seqlen_q, params.d);  // (seqlen_q, d)
        Tensor gQ = local_tile(mQ, TileQ{}, make_coord(m_block, 0));                                    // (BLK_M, HD)
        auto thr_copy = thread_copy(threadIdx.x);
        copy_tile_async(typename Traits::GmemTiledCopyQKV{}, thr_copy.partition_S(gQ), thr_copy.partition_D(sQ()),
                        thr_copy.partition_S(make_identity_tensor(TileQ{})), column_in_range,
                        RowRange{0, info.seqlen_q - m_block * kBlockM});
        cp_async_fence();
    }

    __device__ __forceinline__ KeyBlocks key_blocks_of(const TensorRef &x) const {
        Tensor mX = head_tensor<Element>(x, bidb, bidh_k, info.k_begin, info.seqlen_k, params.d);  // (seqlen_k, d)
        return local_tile(mX, TileKV{}, make_coord(_, 0));
    }

    // Starts the copy of a key block of K or V. Keys past the end of the sequence become zeros.
    __device__ __forceinline__ void load_kv(const TensorRef &x, const KeyBlocks &gX, Element *target, int n_block) {
        typename Traits::GmemTiledCopyQKV gmem_copy;
        auto thr_copy = thread_copy(thread_index<kRecomputesAddresses>());
        Tensor sX = make_tensor(make_smem_ptr(target), typename Traits::SmemLayoutKV{});  // (BLK_N, HD)
        Tensor coords = thr_copy.partition_S(make_identity_tensor(TileKV{}));
        if constexpr (kKind == Kind::paged) {
            const Element *head = static_cast<const Element *>(x.ptr) + bidh_k * x.head_stride;
            const int *page_table = params.block_table + bidb * params.block_table_batch_stride;
            copy_paged_tile_async(gmem_copy, x, head, page_table, params.num_pages, params.page_size,
                                  thr_copy.partition_D(sX), coords, column_in_range, n_block * kBlockN, info.seqlen_k);
        } else {
            copy_tile_async(gmem_copy, thr_copy.partition_S(gX(_, _, n_block)), thr_copy.partition_D(sX), coords,
                            column_in_range, RowRange{0, info.seqlen_k - n_block * kBlockN});
        }
        cp_async_fence();
    }

    // Reads the slices of Q that stay in registers.
    __device__ __forceinline__ void read_q() {
        if constexpr (kQSteps > 0) {
            cp_async_wait<1>();
            __syncthreads();  // Q has arrived for all threads
            auto smem_copy = make_tiled_copy_A(LdMatrix{}, TiledMma{});
            auto thr_copy = smem_copy.get_thread_slice(threadIdx.x);
            Tensor source = thr_copy.partition_S(sQ());  // (CPY, CPY_M, CPY_K)
            Tensor target = thr_copy.retile_D(tSrQ);     // (CPY, CPY_M, CPY_K)
            CUTE_UNROLL
            for (int k = 0; k < kQSteps; ++k) {
                copy(smem_copy, source(_, _, k), target(_, _, k));
            }
        }
    }

    // ---- Products ----

    __device__ auto sQ() const {  // (BLK_M, HD)
        return make_tensor(make_smem_ptr(shared.q), typename Traits::SmemLayoutQ{});
    }

    // acc_s = Q K^T
    template <typename TensorS>
    __device__ __forceinline__ void multiply_qk(TensorS &acc_s) {
        TiledMma mma;
        Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::SmemLayoutKV{});  // (BLK_N, HD)
        Tensor tSrK = mma.get_thread_slice(threadIdx.x).partition_fragment_B(sK);           // (MMA, MMA_N, MMA_K)
        clear(acc_s);
        gemm<kQSteps>(acc_s, tSrQ, tSrK, sQ(), sK, mma, make_tiled_copy_A(LdMatrix{}, mma),
                      make_tiled_copy_B(LdMatrix{}, mma), thread_index<kRecomputesAddresses>());
    }

    // acc_o += P V
    template <typename TensorP, typename TensorO>
    __device__ __forceinline__ void multiply_pv(const TensorP &acc_p, TensorO &acc_o) {
        TiledMma mma;
        Tensor sVt = make_tensor(make_smem_ptr(shared.v), typename Traits::SmemLayoutVt{});  // (HD, BLK_N)
        Tensor tOrVt = mma.get_thread_slice(threadIdx.x).partition_fragment_B(sVt);          // (MMA, MMA_K, MMA_N)
        Tensor rP = convert_type<Element>(acc_p);                                            // (MMA, MMA_M, MMA_N)
        Tensor tOrP = make_tensor(rP.data(), operand_A_layout(rP.layout()));                 // (MMA, MMA_M, MMA_K)
        auto copy_V = make_tiled_copy_B(LdMatrixTransposed{}, mma);
        auto thr_copy_V = copy_V.get_thread_slice(threadIdx.x);
        gemm_rs(acc_o, tOrP, tOrVt, thr_copy_V.partition_S(sVt), mma, copy_V, thr_copy_V);
    }

    // ---- Scores ----

    __device__ static auto coords_of_scores(int thread) {  // (row, col) -> (row, key)
        Tensor coords = TiledMma{}.get_thread_slice(thread).partition_C(make_identity_tensor(TileS{}));
        return make_tensor(coords.data(), rowcol_layout(coords.layout()));
    }

    // Softcap and ALiBi.
    template <typename TensorS>
    __device__ __forceinline__ void modify_scores(TensorS &scores, int n_block) {
        if (is_general(kKind) && ScoreMod::is_on(params)) {
            const ScoreMod mod(params, bidb, bidh, info.seqlen_k - info.seqlen_q);
            mod.apply</*kTransposed=*/false>(scores, coords_of_scores(thread_index<true>()), coords_of_scores(0),
                                             m_block * kBlockM, n_block * kBlockN, NoOp{});
        }
    }

    template <typename TensorP>
    __device__ __forceinline__ void drop_probabilities(TensorP &p, int n_block) {
        if (is_general(kKind) && params.rng_state != nullptr) {
            const DropoutStream stream(params.rng_state, bidb, params.h, bidh);
            drop(p, coords_of_scores(thread_index<true>()), stream, params.dropout_threshold, m_block * kBlockM,
                 n_block * kBlockN);
        }
    }
};

}  // namespace flash::sm80
