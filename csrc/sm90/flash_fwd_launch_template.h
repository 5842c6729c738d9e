// run_flash_fwd: the TMA descriptors, grid and shared memory of one kernel, and its launch.
#pragma once

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "../common/launch.h"
#include "../device.h"
#include "../trace.h"
#include "flash_fwd.h"
#include "flash_fwd_kernel.h"

namespace flash::sm90 {

// A tensor (seqlen, d, heads, batch); varlen (total, d, heads, 1). The stride of a dimension of one element has no
// meaning, and TMA may not accept it: it is replaced.
template <typename Element>
auto global_tensor(const TensorRef &x, int64_t rows, int d, int heads, int batch) {
    const auto stride = [](int size, int64_t stride) { return size > 1 ? stride : int64_t(16 / sizeof(Element)); };
    return make_tensor(make_gmem_ptr(static_cast<const Element *>(x.ptr)),
                       make_shape(static_cast<int>(rows), d, heads, batch),
                       make_stride(stride(static_cast<int>(rows), x.row_stride), _1{}, stride(heads, x.head_stride),
                                   stride(batch, x.batch_stride)));
}

// cuTensorMapEncodeTiled leaves the descriptor empty when it fails, and CuTe only asserts.
template <typename TMA>
TMA checked(TMA tma) {
    const TmaDescriptor empty{};
    if (std::memcmp(tma.get_tma_descriptor(), &empty, sizeof(empty)) == 0) {
        throw std::runtime_error("flash_attn_mini: cuTensorMapEncodeTiled does not accept the tensors of this call");
    }
    return tma;
}

template <typename Traits>
typename Traits::Copies make_copies(const Flash_fwd_params &params) {
    using Element = typename Traits::Element;
    const bool is_varlen = params.cu_seqlens_q != nullptr;
    const int64_t rows_q = is_varlen ? params.total_q : params.seqlen_q;
    const int64_t rows_k = is_varlen ? params.total_k : params.seqlen_k;
    const int batch_q = is_varlen ? 1 : params.b, batch_k = params.cache.is_used() ? params.cache.batch_cache : batch_q;
    const auto of_KV = [&](const TensorRef &x) {
        return checked(make_tma_copy(SM90_TMA_LOAD{}, global_tensor<Element>(x, rows_k, params.d, params.h_k, batch_k),
                                     take<0, 2>(typename Traits::SmemLayoutKV{}), typename Traits::TileKV{}, _1{}));
    };
    return {
        checked(make_tma_copy(SM90_TMA_LOAD{}, global_tensor<Element>(params.q, rows_q, params.d, params.h, batch_q),
                              take<0, 2>(typename Traits::SmemLayoutQ{}), typename Traits::TileQ{}, _1{})),
        of_KV(params.k), of_KV(params.v)};
}

template <typename Traits, Kind kKind>
void launch(const Flash_fwd_params &params, int *tile_counter, cudaStream_t stream) {
    constexpr int kMaxSmem = 227 * 1024;
    static_assert(Traits::kSmemSize <= kMaxSmem, "more shared memory than a thread block may have");
    auto kernel = &flash_fwd_kernel<Traits, kKind>;
    const RowBlocks blocks = row_blocks<is_general(kKind)>(params, Traits::kBlockM);
    const int sms = device_properties().sm_count;
    check_grid(blocks.count() + sms, "batch * nheads * blocks of query rows");  // CTAs count past the end
    const WorkTileOrder order(blocks, params.is_local(), sms, tile_counter);
    const int grid = std::min(order.units, sms);
    reserve_smem(kernel, Traits::kSmemSize);
    if (trace_enabled()) {
        trace("flash_fwd_kernel", "kKind=%s kBlockM=%d kBlockN=%d stages=%d grid=%d units=%d threads=%d smem=%d",
              name_of(kKind), Traits::kBlockM, Traits::kBlockN, Traits::kStages, grid, order.units, Traits::kNThreads,
              Traits::kSmemSize);
    }
    kernel<<<grid, Traits::kNThreads, Traits::kSmemSize, stream>>>(params, make_copies<Traits>(params), order);
    check_cuda(cudaGetLastError(), "launching flash_fwd_kernel");
}

// True if full attention takes less time in the shorter tiles, because the longer ones would leave SMs idle.
template <typename TileSize, typename Short>
bool fills_better_in_short_tiles(const Flash_fwd_params &params) {
    const auto rows_of_busiest = [&, sms = device_properties().sm_count](int kBlockM) {
        const int64_t count = row_blocks</*kMayBeVarlen=*/false>(params, kBlockM).count();
        return (count + sms - 1) / sms * kBlockM;
    };
    return kCostOfShortTiles * rows_of_busiest(Short::kBlockM) < rows_of_busiest(TileSize::kBlockM);
}

template <DType kDType, int kHeadDim, Kind kKind>
void run_flash_fwd(const Flash_fwd_params &params, int *tile_counter, cudaStream_t stream) {
    using TileSize = TileSizesFwd<kHeadDim, is_local(kKind)>;
    using Short = TileSizesFwdShort<kHeadDim>;
    if constexpr (!is_general(kKind) && Short::kBlockM != TileSize::kBlockM) {
        const bool is_short = kKind == Kind::local ? params.seqlen_q <= kShortSeqlen
                                                   : fills_better_in_short_tiles<TileSize, Short>(params);
        if (is_short) {  // full attention runs as a window without ends
            launch<Flash_fwd_kernel_traits<kDType, kHeadDim, Short>, Kind::local>(params, tile_counter, stream);
            return;
        }
    }
    launch<Flash_fwd_kernel_traits<kDType, kHeadDim, TileSize>, kKind>(params, tile_counter, stream);
}

}  // namespace flash::sm90
