// Compiled once per dtype, head dim and kind of has_dq_pass: build_tools/kernels.py defines FLASH_DTYPE, FLASH_HEADDIM
// and FLASH_KIND.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // tiles of 80 keys
#include "common/trace.h"
#include "dispatch/launch.h"
#include "flash_bwd_dq.h"
#include "flash_bwd_dq_kernel.h"

namespace flash::sm90 {

template <DType kDType, int kHeadDim, Kind kKind>
void run_flash_bwd_dq(const Flash_bwd_params &params, cudaStream_t stream) {
    using Traits = Flash_bwd_dq_traits<kDType, kHeadDim>;
    using Element = typename Traits::Element;
    const bool is_varlen = params.cu_seqlens_q != nullptr;
    const int64_t rows_q = is_varlen ? params.total_q : params.seqlen_q;
    const int64_t rows_k = is_varlen ? params.total_k : params.seqlen_k;
    const int batch = is_varlen ? 1 : params.b;
    // TMA fills the columns of a tile past those of the tensor with zeros.
    const auto of_Q = [&](const TensorRef &x, int columns) {
        return make_tma_load<Element, decltype(take<0, 2>(typename Traits::SmemLayoutQ{})), typename Traits::TileQ>(
            x, rows_q, columns, params.h, batch);
    };
    const auto of_K = [&](const TensorRef &x, int columns) {
        return make_tma_load<Element, decltype(take<0, 2>(typename Traits::template SmemLayoutK<1>{})),
                             typename Traits::TileK>(x, rows_k, columns, params.h_k, batch);
    };
    const typename Traits::Copies copies{of_Q(params.q, params.d), of_Q(params.dout, params.d_v),
                                         of_K(params.k, params.d), of_K(params.v, params.d_v)};
    const int64_t grid = row_blocks<may_be_varlen(kKind)>(params, Traits::kBlockM).count();
    check_grid(grid, "batch * nheads * blocks of query rows");
    if (trace_enabled()) {
        trace("flash_bwd_dq_kernel", "kKind=%s kBlockM=%d kBlockN=%d stages=%d,%d grid=%lld threads=%d smem=%d",
              name_of(kKind), Traits::kBlockM, Traits::kBlockN, Traits::kStagesK, Traits::kStagesV,
              static_cast<long long>(grid), Traits::kNThreads, Traits::kSmemSize);
    }
    auto kernel = &flash_bwd_dq_kernel<Traits, kKind>;
    reserve_smem(kernel, Traits::kSmemSize);
    kernel<<<static_cast<unsigned>(grid), Traits::kNThreads, Traits::kSmemSize, stream>>>(params, copies);
    check_cuda(cudaGetLastError(), "launching flash_bwd_dq_kernel");
}

template void run_flash_bwd_dq<DType::FLASH_DTYPE, FLASH_HEADDIM, Kind::FLASH_KIND>(const Flash_bwd_params &,
                                                                                    cudaStream_t);

}  // namespace flash::sm90
