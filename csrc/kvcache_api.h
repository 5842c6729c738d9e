// mha_fwd_kvcache, the entry of flash_attn_with_kvcache, as `fwd_kvcache` of the extension.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace flash {

void bind_kvcache(pybind11::module_ &module);

}  // namespace flash
