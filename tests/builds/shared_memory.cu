// Prints the bytes of shared memory that a thread block of each kernel of sm80 and of a KV cache needs:
// kernel, head dim, kind, bytes. For the backward also the bytes of its small tile. test_shared_memory.py reads it.
#include <cstdio>

#include "dispatch/kind.h"
#include "kvcache/key_tiles.h"
#include "sm80/backward/kernel_traits_bwd.h"
#include "sm80/forward/kernel_traits.h"

using namespace flash;

template <int kHeadDim, bool kIsGeneral>
void print_forward() {
    using Traits = sm80::Flash_fwd_kernel_traits<DType::bfloat16, kHeadDim, sm80::TileSizesFwd<kHeadDim, kIsGeneral>>;
    std::printf("forward %d %s %d\n", kHeadDim, kIsGeneral ? "general" : "other", Traits::kSmemSize);
}

// kHasBulkReduce: the kernels of newer GPUs need more, to stage dQ.
template <int kHeadDim, Kind kKind, typename TileSize>
constexpr int kSmemBwd =
    sm80::Flash_bwd_kernel_traits<DType::bfloat16, kHeadDim, TileSize, /*kHasBulkReduce=*/true, kKind>::kSmemSize;

template <int kHeadDim, Kind kKind, sm80::BwdMode kMode>
void print_backward() {
    using Large = typename sm80::TileSizesBwd<kHeadDim, kKind, kMode>::TileSize;
    using Small = typename sm80::TileSizesBwdSmall<kHeadDim>::TileSize;
    std::printf("backward %d %s %d %d\n", kHeadDim, name_of(kKind), kSmemBwd<kHeadDim, kKind, Large>,
                kSmemBwd<kHeadDim, Kind::general, Small>);
}

template <int kHeadDim>
void print_all() {
    using sm80::BwdMode;
    print_forward<kHeadDim, false>();
    print_forward<kHeadDim, true>();
    print_backward<kHeadDim, Kind::full, BwdMode::all>();
    print_backward<kHeadDim, Kind::local, BwdMode::all>();
    print_backward<kHeadDim, Kind::full, BwdMode::deterministic>();
    print_backward<kHeadDim, Kind::general, BwdMode::general>();
    using Traits = kvcache::SplitkvTraits<DType::bfloat16, kHeadDim, kvcache::Form::many_rows>;
    std::printf("splitkv %d many_rows %d\n", kHeadDim, Traits::smem_size(4 * kvcache::kWarpRows));
}

int main() {
    std::printf("limit 0 smallest %d\n", sm80::kMinDeviceSmem);
    print_all<32>();
    print_all<64>();
    print_all<96>();
    print_all<128>();
    print_all<192>();
    print_all<256>();
}
