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
    return scratch_floats(params, split_plan<Flash_fwd_latent_traits<kDType>>(params), kHeadDimVLatentCache);
}

template <DType kDType>
void run_flash_fwd_latent(const Flash_fwd_params &params, cudaStream_t stream) {
    using Traits = Flash_fwd_latent_traits<kDType>;
    const kvcache::SplitkvPlan plan = split_plan<Traits>(params);
    const int rows = rows_of_box<Traits>(params);
    const KeyBoxes boxes{describe_boxes<Traits>(params, params.k, rows), /*v=*/{}, rows};
    launch_split<Traits>(params, plan, boxes, &flash_fwd_latent_kernel<Traits>, "flash_fwd_latent_kernel", stream);
    if (plan.pieces > 1) {
        run_combine_splits<kDType, kHeadDimVLatentCache>(params, plan, stream);
    }
}

template int64_t latent_scratch_floats<DType::FLASH_DTYPE>(const Flash_fwd_params &);
template void run_flash_fwd_latent<DType::FLASH_DTYPE>(const Flash_fwd_params &, cudaStream_t);

}  // namespace sm90
}  // namespace flash
