// Compiled once per dtype: build_tools/kernels.py defines FLASH_DTYPE.
#include "flash_fwd_latent_kernel.h"
#include "flash_fwd_latent_narrow_kernel.h"
#include "flash_fwd_split_launch_template.h"
#include "kvcache/splitkv_launch_template.h"

namespace flash {

template void run_combine_splits<DType::FLASH_DTYPE, kHeadDimVLatentCache>(const Flash_fwd_params &,
                                                                           const kvcache::SplitkvPlan &, cudaStream_t);

namespace sm90 {

// Calls function with the kernel that a call needs, its traits and its name.
template <DType kDType, typename Function>
auto call_with_latent_kernel(const Flash_fwd_params &params, const Function &function) {
    using Narrow = Flash_fwd_latent_narrow_traits<kDType>;
    using Wide = Flash_fwd_latent_traits<kDType>;
    return int64_t{params.seqlen_q} * params.h_h_k_ratio <= Narrow::kBlockM
               ? function(Narrow{}, &flash_fwd_latent_narrow_kernel<Narrow>, "flash_fwd_latent_narrow_kernel")
               : function(Wide{}, &flash_fwd_latent_kernel<Wide>, "flash_fwd_latent_kernel");
}

template <DType kDType>
int64_t latent_scratch_floats(const Flash_fwd_params &params) {
    return call_with_latent_kernel<kDType>(params, [&](auto traits, auto *, const char *) {
        return scratch_floats(params, split_plan<decltype(traits)>(params), kHeadDimVLatentCache);
    });
}

template <DType kDType>
void run_flash_fwd_latent(const Flash_fwd_params &params, cudaStream_t stream) {
    call_with_latent_kernel<kDType>(params, [&](auto traits, auto *kernel, const char *name) {
        using Traits = decltype(traits);
        const kvcache::SplitkvPlan plan = split_plan<Traits>(params);
        const int rows = rows_of_box<Traits>(params);
        const KeyBoxes boxes{describe_boxes<Traits>(params, params.k, rows), /*v=*/{}, rows};
        launch_split<Traits>(params, plan, boxes, kernel, name, stream);
        if (plan.pieces > 1) {
            run_combine_splits<kDType, kHeadDimVLatentCache>(params, plan, stream);
        }
    });
}

template int64_t latent_scratch_floats<DType::FLASH_DTYPE>(const Flash_fwd_params &);
template void run_flash_fwd_latent<DType::FLASH_DTYPE>(const Flash_fwd_params &, cudaStream_t);

}  // namespace sm90
}  // namespace flash
