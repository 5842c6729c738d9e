// The instructions of the split-KV kernel: m16n8k16 on the tensor cores, ldmatrix, cp.async, clusters.
#pragma once

#include <cutlass/numeric_types.h>

#include <cstdint>
#include <type_traits>

namespace flash::kvcache {

// acc += A B for a 16 x 16 tile of A and a 16 x 8 tile of B.
template <typename Element>
__device__ __forceinline__ void mma_m16n8k16(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<Element, cutlass::half_t>) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// Four 8 x 8 matrices; lane i holds the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Starts a copy of 16 bytes to shared memory; writes zeros and reads nothing if !is_in_range.
__device__ __forceinline__ void cp_async_16(uint32_t target, const void *source, bool is_in_range) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                 "r"(is_in_range ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kInFlight>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kInFlight) : "memory");
}

// Waits for `threads` threads of the CTA. id: 1 to 15; __syncthreads has 0.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Two values rounded to Element.
template <typename Element>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t packed;
    if constexpr (std::is_same_v<Element, cutlass::half_t>) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    }
    return packed;
}

// Programmatic launches (compute capability 9.0): the next kernel of the stream may be scheduled; wait until the kernel
// before has ended and its writes are visible.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- thread block clusters (Hopper and later): barriers, and reads of another CTA's shared memory

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
