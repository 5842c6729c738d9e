// Thread block clusters (Hopper and later): barriers, and reads of another CTA's shared memory.
#pragma once

#include <cstdint>

namespace flash::kvcache {

constexpr int kMaxCluster = 16;  // CTAs; more than 8 need the attribute for sizes that are not portable

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define FLASH_HAS_CLUSTERS
#endif

// Waits for all threads of the cluster. What they wrote to shared memory before is visible after it.
__device__ __forceinline__ void cluster_sync() {
#ifdef FLASH_HAS_CLUSTERS
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The address of an object of this CTA's shared memory in the CTA with rank `rank`.
template <typename T>
__device__ __forceinline__ uint32_t address_in(int rank, const T *object) {
    uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(object));
#ifdef FLASH_HAS_CLUSTERS
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
#endif
    return address;
}

__device__ __forceinline__ float2 load_float2(uint32_t address) {
    float2 x{};
#ifdef FLASH_HAS_CLUSTERS
    asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
#endif
    return x;
}
__device__ __forceinline__ float4 load_float4(uint32_t address) {
    float4 x{};
#ifdef FLASH_HAS_CLUSTERS
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address)
                 : "memory");
#endif
    return x;
}

}  // namespace flash::kvcache
