// Compiled once per dtype: build_tools/kernels.py defines FLASH_DTYPE.
#include "flash_fwd_latent_kernel.h"
#include "flash_fwd_split_launch_template.h"
#include "kvcache/splitkv_launch_template.h"

namespace flash {

template void run_combine_splits<DType::FLASH_DTYPE, kHeadDimVLatentCache>(const Flash_fwd_params &,
                                                                           const kvcache::SplitkvPlan &, cudaStream_t);

namespace sm90 {

template <DType kDType>
int64_t latent_scratch_floats(const Flash_fwd_params &params) {
    const kvcache::SplitkvPlan plan = split_plan<Flash_fwd_latent_traits<kDType>>(params);
    const int64_t rows = std::min<int64_t>(plan.tile_rows, int64_t{params.seqlen_q} * params.h_h_k_ratio);
    return plan.pieces > 1 ? plan.scratch_floats(params, rows, kHeadDimVLatentCache) : 0;
}

template <DType kDType>
void run_flash_fwd_latent(const Flash_fwd_params &params, cudaStream_t stream) {
    using Traits = Flash_fwd_latent_traits<kDType>;
    static_assert(Traits::kSmemSize <= 227 * 1024, "more shared memory than a thread block may have");
    const kvcache::SplitkvPlan plan = split_plan<Traits>(params);
    const int64_t grid = int64_t{plan.pieces} * plan.row_tiles;
    check_grid(grid, "blocks of query rows * pieces of the keys");
    if (trace_enabled()) {
        trace("flash_fwd_latent_kernel", "rows=%d row_tiles=%d pieces=%d kBlockN=%d stages=%d threads=%d smem=%d",
              plan.tile_rows, plan.row_tiles, plan.pieces, Traits::kBlockN, Traits::kStages, Traits::kNThreads,
              Traits::kSmemSize);
    }
    auto kernel = &flash_fwd_latent_kernel<Traits>;
    reserve_smem(kernel, Traits::kSmemSize);
    const int rows = params.block_table == nullptr ? Traits::kBlockN : std::gcd(params.page_size, Traits::kBlockN);
    const KeyBoxes boxes{describe_boxes<Traits>(params, params.k, rows), {}, rows};
    ProgrammaticLaunch(dim3(static_cast<unsigned>(grid)), 1, Traits::kNThreads, Traits::kSmemSize, stream)
        .run(kernel, "launching flash_fwd_latent_kernel", params, boxes, plan);
    if (plan.pieces > 1) {
        run_combine_splits<kDType, kHeadDimVLatentCache>(params, plan, stream);
    }
}

template int64_t latent_scratch_floats<DType::FLASH_DTYPE>(const Flash_fwd_params &);
template void run_flash_fwd_latent<DType::FLASH_DTYPE>(const Flash_fwd_params &, cudaStream_t);

}  // namespace sm90
}  // namespace flash
