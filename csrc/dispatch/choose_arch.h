// Whether a CUDA call runs on a kernel of csrc/sm90 or of csrc/sm80, and the kind of kernel. Only run_mha.cpp and
// choose_cache_kernel.h use it.
#pragma once

#include <cstdlib>
#include <string>

#include "common/message.h"
#include "dispatch/built.h"
#include "dispatch/device.h"
#include "dispatch/kind.h"
#include "dispatch/run_mha.h"
#include "flash.h"
#include "sm90/common/call_limits.h"

namespace flash {

// The kernel that a call needs.
inline Kind kind_of(const Flash_fwd_params &params) {
    if (params.block_table != nullptr) {
        return Kind::paged;
    }
    if (params.has_score_mod() || params.rng_state != nullptr) {
        return Kind::general;
    }
    const bool may_differ = params.cu_seqlens_q != nullptr || params.cache.is_used();  // the lengths of sequences
    return may_differ ? Kind::varlen : params.is_local() ? Kind::local : Kind::full;
}

// FLASH_ATTN_MINI_ARCH names the architecture whose kernels run, to compare them: 80 or 90. 0: the best one.
inline int requested_arch() {
    const char *variable = std::getenv("FLASH_ATTN_MINI_ARCH");
    const std::string arch = variable == nullptr ? "" : variable;
    FLASH_CHECK_VALUE(arch.empty() || arch == "80" || arch == "90", "FLASH_ATTN_MINI_ARCH is '", arch,
                      "'; allowed: 80, 90");
    return arch.empty() ? 0 : std::stoi(arch);
}

// The kernel that a backward needs. Hopper's kernels of kind local assume that every query sees a key. Otherwise they
// would have to write zeros over such rows in each step, because NaN times 0 is NaN. Calls without any key start no
// kernel.
inline Kind kind_of(const Flash_bwd_params &params) {
    const Kind kind = kind_of(static_cast<const Flash_fwd_params &>(params));
    const int64_t right = params.window_size_right;
    const bool has_rows_without_key = right >= 0 && params.seqlen_q > params.seqlen_k + right;
    if (kind != Kind::local || !has_rows_without_key) {
        return kind;
    }
    return device_properties().major == 9 && requested_arch() != 80 ? Kind::varlen : kind;
}

// True if the call has an sm90 kernel, and its sm80 kernel is not compiled for this GPU. has_sm90: the build has one.
inline bool has_only_sm90(bool has_sm90) {
    return has_sm90 && !kHasSm80OnHopper && device_properties().major == 9;
}

// RuntimeError if FLASH_ATTN_MINI_ARCH asks for an sm80 kernel that the build lacks.
inline void check_requested_arch(bool has_sm90) {
    if (requested_arch() == 80 && has_only_sm90(has_sm90)) {
        const DeviceProperties &gpu = device_properties();
        FLASH_CHECK(false, "FLASH_ATTN_MINI_ARCH is 80, but ", sm80_unavailable_reason(gpu.major, gpu.minor));
    }
}

// Null if the call runs on an sm90 kernel; else why it runs on an sm80 kernel.
template <typename Params>
const char *reason_against_sm90(const Params &params, bool has_sm90) {
    check_requested_arch(has_sm90);
    if (requested_arch() == 80) {
        return "FLASH_ATTN_MINI_ARCH is 80";
    }
    if (device_properties().major != 9) {
        return "the GPU is not a Hopper";
    }
    if (!has_sm90) {
        return "this build has no sm90 kernel for this call";
    }
    return kHasSm80OnHopper ? sm90::reason_against(params) : nullptr;  // without it copy_for_tma makes copies
}

}  // namespace flash
