// The only place where dtype, head dim and kind of call become template arguments. The choice of architecture is here
// too; sm80/flash_bwd_launch_template.h makes the further choices of sm80's backward.
#include "run_mha.h"

#include "cpu/flash_bwd_cpu.h"
#include "cpu/flash_fwd_cpu.h"
#include "cpu/kvcache_cpu.h"
#include "message.h"
#include "static_switch.h"
#include "trace.h"

#ifdef FLASH_WITH_CUDA
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "device.h"
#include "kernel_memory.h"
#include "kvcache/splitkv.h"
#include "sm80/flash_bwd.h"
#include "sm80/flash_fwd.h"
#include "sm90/call_limits.h"
#include "sm90/flash_bwd.h"
#include "sm90/flash_fwd.h"
#include "sm90/flash_fwd_split.h"
#endif

namespace flash {

// Hopper's own instructions need the architecture 90a.
static const char *best_suffix(int major, int minor) {
    return major == 9 && minor == 0 ? "a" : "";
}

std::vector<std::string> built_arch_names() {
    std::vector<std::string> names;
    for (int arch : kBuiltArchs) {
        names.push_back(message(arch, contains(kExactArchs, arch) ? "a" : ""));
        if (arch == 90 && kHasSm90 && kHasSm80OnHopper) {
            names.push_back("90a");
        }
    }
    return names;
}

#ifdef FLASH_WITH_CUDA

namespace {

// Bytes of shared memory that a CTA may have. FLASH_ATTN_MINI_MAX_SMEM lowers the limit, to test the tiles for smaller
// GPUs on a larger one.
int max_smem() {
    const int limit = device_properties().max_smem;
    const char *variable = std::getenv("FLASH_ATTN_MINI_MAX_SMEM");
    const int lowered = variable == nullptr ? 0 : std::atoi(variable);
    return lowered > 0 && lowered < limit ? lowered : limit;
}

// RuntimeError unless this build has a kernel for the GPU, the dtype and the head dim.
void check_built(const Flash_fwd_params &params) {
    const DeviceProperties &gpu = device_properties();
    const std::string reason = cuda_unavailable_reason(gpu.major, gpu.minor);
    FLASH_CHECK(reason.empty(), reason);
    FLASH_CHECK(is_built(params.dtype), "no kernel was compiled for this dtype; build it with: ",
                "FLASH_ATTN_MINI_DTYPES=\"fp16;bf16\" pip install .");
    FLASH_CHECK(built_headdim_for(params.d) != 0, "no kernel was compiled for headdim ", params.d,
                "; compiled: ", list_of(kBuiltHeadDims), "; build them all with: FLASH_ATTN_MINI_HDIMS= pip install .");
}

// The kernel that a call needs.
Kind kind_of(const Flash_fwd_params &params) {
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
int requested_arch() {
    const char *variable = std::getenv("FLASH_ATTN_MINI_ARCH");
    const std::string arch = variable == nullptr ? "" : variable;
    FLASH_CHECK_VALUE(arch.empty() || arch == "80" || arch == "90", "FLASH_ATTN_MINI_ARCH is '", arch,
                      "'; allowed: 80, 90");
    return arch.empty() ? 0 : std::stoi(arch);
}

// True if the call has an sm90 kernel, and its sm80 kernel is not compiled for this GPU. has_sm90: the build has one.
bool has_only_sm90(bool has_sm90) {
    return has_sm90 && !kHasSm80OnHopper && device_properties().major == 9;
}

// RuntimeError if FLASH_ATTN_MINI_ARCH asks for an sm80 kernel that the build lacks.
void check_requested_arch(bool has_sm90) {
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

// reason: against sm90; null: none.
void trace_arch(const char *function, const char *reason, int headdim, Kind kind) {
    if (trace_enabled()) {
        const bool is_sm90 = reason == nullptr;
        trace(function, "device=cuda arch=%s kHeadDim=%d kKind=%s%s%s", is_sm90 ? "sm90" : "sm80", headdim,
              name_of(kind), is_sm90 ? "" : " because: ", is_sm90 ? "" : reason);
    }
}

at::Tensor zeros_on_gpu(int64_t count) {
    return at::zeros({count}, at::TensorOptions(at::kInt).device(c10::Device(at::kCUDA, c10::cuda::current_device())));
}

void run_mha_fwd_cuda(Flash_fwd_params &params) {
    check_built(params);
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
    FP16_SWITCH(params.dtype, [&] {
        HEADDIM_SWITCH(params.d, [&] {
            KIND_SWITCH(kind_of(params), [&] {
                constexpr bool kHasKernelSm90 = kKind != Kind::split && has_sm90_fwd(kHeadDim, kKind);
                const char *reason = reason_against_sm90(params, kHasKernelSm90);
                trace_arch("run_mha_fwd", reason, kHeadDim, kKind);
                if constexpr (kHasKernelSm90) {
                    if (reason == nullptr) {
                        const std::vector<at::Tensor> copies = copy_for_tma(params);  // live until the launch
                        const at::Tensor counter = params.cu_seqlens_q != nullptr ? zeros_on_gpu(1) : at::Tensor();
                        int *tile_counter = counter.defined() ? counter.data_ptr<int>() : nullptr;
                        sm90::run_flash_fwd<kDType, kHeadDim, kind_of_sm90_fwd(kKind)>(params, tile_counter, stream);
                        return;
                    }
                }
                if constexpr (has_sm80_fwd(kHeadDim, kKind)) {
                    sm80::run_flash_fwd<kDType, kHeadDim, kKind>(params, stream);
                }
            });
        });
    });
}

// True if the kernels of the forward can read the cache: 16 bytes at a time.
bool is_readable_by_forward(const Flash_fwd_params &params) {
    return is_aligned(params.q, params.d) && is_aligned(params.k, params.d) && is_aligned(params.v, params.d) &&
           is_aligned(params.o, params.d);
}

// The kernels that may attend over a cache.
enum class CacheKernel {
    splitkv,     // kvcache/: any call, any GPU
    split_sm90,  // Hopper: many rows of a group of heads
    forward,     // those of the forward
};

constexpr int kRowsOfTile = 128;  // of split_sm90 and of the forward

// Queries of all heads that share a key/value head: the rows that a tile of splitkv and split_sm90 holds.
int64_t packed_rows(const Flash_fwd_params &params) {
    return int64_t{params.seqlen_q} * params.h_h_k_ratio;
}

// Work tiles of the forward, `rows` queries each.
int64_t forward_tiles(const Flash_fwd_params &params, int rows = kRowsOfTile) {
    return int64_t{params.b} * params.h * ((params.seqlen_q + rows - 1) / rows);
}

// True if the kernels of the forward take less time than splitkv: the queries alone fill the GPU, and most of the rows
// of a tile are queries. They multiply faster, but work on each head alone and do not split keys.
bool prefers_forward(const Flash_fwd_params &params) {
    constexpr int kSpeedup = 4;  // over splitkv
    const int64_t tiles = forward_tiles(params), rows = packed_rows(params) * params.b * params.h_k;
    const bool fills_gpu = tiles * 4 >= device_properties().sm_count * 3;
    return params.block_table == nullptr && fills_gpu && packed_rows(params) > 64 &&
           tiles * kRowsOfTile < kSpeedup * rows;
}

// True if the build and the GPU have split_sm90, and it takes the call.
bool runs_split_sm90(const Flash_fwd_params &params) {
    return device_properties().major == 9 && requested_arch() != 80 &&
           has_sm90_fwd(built_headdim_for(params.d), Kind::split) && params.alibi_slopes == nullptr &&
           packed_rows(params) <= INT32_MAX - kRowsOfTile && sm90::can_split(params);
}

// True if split_sm90 takes less time than the kernels of the forward. It splits keys, so that all SMs end at once; they
// take whole tiles, and need no second kernel.
bool prefers_split_sm90(const Flash_fwd_params &params) {
    const double cost = packed_rows(params) <= 64 ? 0.6 : 1.06;  // of a tile of split_sm90, in tiles of the forward
    const int rows_of_forward = built_headdim_for(params.d) == 64 ? 192 : kRowsOfTile;
    const int64_t sms = device_properties().sm_count;
    const int64_t rounds = (forward_tiles(params, rows_of_forward) + sms - 1) / sms;
    const int64_t row_tiles = (packed_rows(params) + kRowsOfTile - 1) / kRowsOfTile;
    return params.block_table != nullptr || cost * double(row_tiles * params.b * params.h_k) < double(rounds * sms);
}

// num_splits = 1 asks for the bits of the varlen forward, so its kernels run. A cache is never copied: splitkv reads
// what the others cannot.
CacheKernel cache_kernel(const Flash_fwd_params &params) {
    const int least_rows = built_headdim_for(params.d) == 64 ? 33 : 17;  // of split_sm90
    const bool is_chosen = params.cache.num_splits == 0 && params.cache.split_keys == 0;
    if (!is_readable_by_forward(params)) {
        return CacheKernel::splitkv;
    }
    if (is_chosen && packed_rows(params) >= least_rows && runs_split_sm90(params)) {
        return prefers_split_sm90(params) ? CacheKernel::split_sm90 : CacheKernel::forward;
    }
    if (params.cache.num_splits != 1 && !(is_chosen && prefers_forward(params))) {
        return CacheKernel::splitkv;
    }
    const bool has_sm90 = has_sm90_fwd(built_headdim_for(params.d), kind_of(params));
    check_requested_arch(has_sm90);  // before anything is appended
    return has_only_sm90(has_sm90) && !sm90::can_describe_cache(params) ? CacheKernel::splitkv : CacheKernel::forward;
}

void run_mha_fwd_splitkv_dispatch(Flash_fwd_params &params, bool follows_append) {
    const CacheKernel kernel = cache_kernel(params);
    if (kernel == CacheKernel::forward) {
        run_mha_fwd_cuda(params);
        return;
    }
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
    FP16_SWITCH(params.dtype, [&] {
        HEADDIM_SWITCH(params.d, [&] {
            const bool is_sm90 = kernel == CacheKernel::split_sm90;
            if (trace_enabled()) {
                trace("run_mha_fwd_splitkv_dispatch", "device=cuda%s kHeadDim=%d", is_sm90 ? " arch=sm90" : "",
                      kHeadDim);
            }
            if constexpr (has_sm90_fwd(kHeadDim, Kind::split)) {
                if (is_sm90) {
                    sm90::run_flash_fwd_split<kDType, kHeadDim>(params, stream);
                    return;
                }
            }
            run_flash_fwd_splitkv<kDType, kHeadDim>(params, max_smem(), follows_append, stream);
        });
    });
}

void run_mha_fwd_kvcache_cuda(Flash_fwd_params &params) {
    check_built(params);
    const bool appends = params.cache.seqlen_new > 0 || params.cache.rotary_cos != nullptr;
    if (appends) {
        FP16_SWITCH(params.dtype, [&] { run_append_kv<kDType>(params, c10::cuda::getCurrentCUDAStream().stream()); });
    }
    if (params.seqlen_q > 0) {
        run_mha_fwd_splitkv_dispatch(params, appends);
    }
}

void run_mha_bwd_cuda(Flash_bwd_params &params) {
    check_built(params);
    params.max_smem = max_smem();
    params.has_bulk_reduce = device_properties().major >= 9;
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
    FP16_SWITCH(params.dtype, [&] {
        HEADDIM_SWITCH(params.d, [&] {
            KIND_SWITCH(kind_of(params), [&] {
                constexpr bool kHasKernelSm90 = has_sm90_bwd(kHeadDim, kKind);
                const char *reason = reason_against_sm90(params, kHasKernelSm90);
                trace_arch("run_mha_bwd", reason, kHeadDim, kKind);
                if constexpr (kHasKernelSm90) {
                    if (reason == nullptr) {
                        const std::vector<at::Tensor> copies = copy_for_tma(params);  // live until the launch
                        const int64_t sequences = params.cu_seqlens_q == nullptr ? params.b : 1;
                        const at::Tensor counts = zeros_on_gpu(2 * sequences * (params.h / params.heads_per_dkv) + 1);
                        params.work_counts = counts.data_ptr<int>();
                        sm90::run_flash_bwd<kDType, kHeadDim, kKind>(params, stream);
                        return;
                    }
                }
                if constexpr (has_sm80_bwd(kHeadDim, kKind)) {
                    sm80::run_flash_bwd<kDType, kHeadDim, kKind>(params, stream);
                }
            });
        });
    });
}

}  // namespace

int64_t splitkv_scratch_floats(const Flash_fwd_params &params) {
    check_built(params);
    const CacheKernel kernel = params.seqlen_q == 0 ? CacheKernel::forward : cache_kernel(params);
    if (kernel == CacheKernel::forward) {
        return 0;
    }
    int64_t floats = 0;
    FP16_SWITCH(params.dtype, [&] {
        HEADDIM_SWITCH(params.d, [&] {
            if constexpr (has_sm90_fwd(kHeadDim, Kind::split)) {
                if (kernel == CacheKernel::split_sm90) {
                    floats = sm90::split_scratch_floats<kDType, kHeadDim>(params);
                    return;
                }
            }
            floats = splitkv_scratch_floats<kDType, kHeadDim>(params, max_smem());
        });
    });
    return floats;
}

std::string cuda_unavailable_reason(int major, int minor) {
    if (runs_on(major, minor)) {
        return {};
    }
    return message("no kernel was compiled for compute capability ", major, ".", minor,
                   "; compiled: ", list_of(built_arch_names()), "; build it with: FLASH_ATTN_MINI_ARCHS=", major, minor,
                   best_suffix(major, minor), " pip install .");
}

std::string sm80_unavailable_reason(int major, int minor) {
    const std::string reason = cuda_unavailable_reason(major, minor);
    if (!reason.empty() || major != 9 || !kHasSm90 || kHasSm80OnHopper) {
        return reason;
    }
    std::string archs = "90";
    for (const std::string &name : built_arch_names()) {
        archs += ";" + name;
    }
    return message("for compute capability 9.0 this build has sm80's kernels only where Hopper has none of its own; ",
                   "build them all with: FLASH_ATTN_MINI_ARCHS=\"", archs, "\" pip install .");
}

#else

constexpr char kNoCuda[] = "this build has no CUDA kernels; with a CUDA build of torch and nvcc, build them with: ";

std::string cuda_unavailable_reason(int major, int minor) {
    return message(kNoCuda, "FLASH_ATTN_MINI_ARCHS=", major, minor, best_suffix(major, minor), " pip install .");
}

std::string sm80_unavailable_reason(int major, int minor) {
    return cuda_unavailable_reason(major, minor);
}

#endif

void run_mha_fwd(Flash_fwd_params &params, c10::Device device) {
    if (device.is_cpu()) {
        if (trace_enabled()) {
            trace("run_mha_fwd", "device=cpu d=%d is_causal=%s", params.d, name_of(params.is_causal));
        }
        run_mha_fwd_cpu(params);
        return;
    }
#ifdef FLASH_WITH_CUDA
    run_mha_fwd_cuda(params);
#else
    FLASH_CHECK(false, kNoCuda, "pip install .");
#endif
}

void run_mha_fwd_kvcache(Flash_fwd_params &params, c10::Device device) {
    if (device.is_cpu()) {
        run_mha_fwd_kvcache_cpu(params);
        return;
    }
#ifdef FLASH_WITH_CUDA
    run_mha_fwd_kvcache_cuda(params);
#else
    FLASH_CHECK(false, kNoCuda, "pip install .");
#endif
}

void run_mha_bwd(Flash_bwd_params &params, c10::Device device) {
    if (device.is_cpu()) {
        if (trace_enabled()) {
            trace("run_mha_bwd", "device=cpu d=%d is_causal=%s", params.d, name_of(params.is_causal));
        }
        run_mha_bwd_cpu(params);
        return;
    }
#ifdef FLASH_WITH_CUDA
    run_mha_bwd_cuda(params);
#else
    FLASH_CHECK(false, kNoCuda, "pip install .");
#endif
}

}  // namespace flash
