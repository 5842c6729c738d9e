// Two CTAs of a cluster that share a key block of 128 keys at head dim 256 (TileSizesBwdPair). Each has 64 keys, and
// computes their dK and dV as a CTA without a peer does. They send each other dS of every step, and each multiplies
// half of the columns of dQ for all 128 keys. So a step adds half as many numbers to dQ in global memory.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "common/block_info.h"
#include "kernel_traits_bwd.h"
#include "kvcache/instructions.h"

namespace flash::sm90 {

// The CTA's number in its cluster.
template <typename Traits>
__device__ __forceinline__ int rank_in_cluster() {
    if constexpr (Traits::kCtas > 1) {
        return static_cast<int>(cute::block_rank_in_cluster());
    } else {
        return 0;
    }
}

// The first key of a consumer, counted from the first one of the key block.
template <typename Traits>
__device__ __forceinline__ int first_key_of_consumer(int warpgroup) {
    return rank_in_cluster<Traits>() * Traits::kKeysOfCta + (Traits::kSplitsKeys ? warpgroup * Traits::kKeys : 0);
}

// Waits for all threads of the CTA, or of its cluster.
template <typename Traits>
__device__ __forceinline__ void sync_ctas() {
    if constexpr (Traits::kCtas > 1) {
        kvcache::cluster_sync();
    } else {
        __syncthreads();
    }
}

// A value in shared memory, of the first CTA of the cluster.
template <typename Traits>
__device__ __forceinline__ int of_first_cta(const int &value) {
    if constexpr (Traits::kCtas > 1) {
        int result;
        asm volatile("ld.shared::cluster.s32 %0, [%1];"
                     : "=r"(result)
                     : "r"(kvcache::address_in(/*rank=*/0, &value))
                     : "memory");
        return result;
    } else {
        return value;
    }
}

// A CTA's side of the exchange of dS. The warpgroup that multiplies dQ calls it.
template <typename Traits>
class ExchangeOfDs {
    using Element = typename Traits::Element;
    using State = PipelineState<Traits::kStagesdS>;
    static constexpr int kElements = Traits::kBlockM * Traits::kKeysOfCta;  // of a CTA's dS, which are contiguous
    static constexpr uint32_t kBytes = kElements * sizeof(Element);
    typename Traits::SharedStorage &shared;

public:
    const int rank, peer;

    __device__ explicit ExchangeOfDs(typename Traits::SharedStorage &shared)
        : shared(shared), rank(uniform(rank_in_cluster<Traits>())), peer(1 - rank) {}

    // Called by one warp when dS of the CTA is complete. The peer's stage is empty: consumer 0 wrote P to the CTA's own
    // stage after both CTAs had released theirs.
    __device__ __forceinline__ void send(const State &state) const {
        if (cute::elect_one_sync()) {
            const Element *source = shared.ds + (state.stage * Traits::kCtas + rank) * kElements;
            auto &full = shared.ds_of_peer_full[state.stage];
            full.arrive_and_expect_tx(kBytes);  // of the peer's
            asm volatile(
                "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                    kvcache::address_in(peer, source)),
                "r"(cute::cast_smem_ptr_to_uint(source)), "r"(kBytes), "r"(kvcache::address_in(peer, &full))
                : "memory");
        }
    }

    // Called by every warp, which reads neither part of dS any more. A stage is empty when both CTAs have released it:
    // the peer has then received this CTA's part, so that the copy has read it.
    __device__ __forceinline__ void release(const State &state) const {
        if (cute::elect_one_sync()) {
            shared.ds_barriers.empty[state.stage].arrive();
            shared.ds_barriers.empty[state.stage].arrive(peer);
        }
    }
};

}  // namespace flash::sm90
