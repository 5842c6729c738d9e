// The only place where dtype, head dim and kind of call become template arguments.
// sm80/backward/flash_bwd_launch_template.h makes the further choices of sm80's backward.
#include "dispatch/run_mha.h"

#include <type_traits>

#include "common/message.h"
#include "common/trace.h"
#include "dispatch/built.h"
#include "dispatch/kind.h"
#include "dispatch/run_flash.h"

#ifdef FLASH_WITH_CUDA
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "api/allocation.h"
#include "api/current_stream.h"
#include "api/key_ranges.h"
#include "choose_kernel.h"
#include "dispatch/device.h"
#include "kvcache/splitkv.h"
#include "sm90/backward/flash_bwd_dq.h"
#endif

// ---- switches: FP16_SWITCH, HEADDIM_SWITCH and KIND_SWITCH turn the dtype, head dim and kind of a call into template
// arguments. Each calls a lambda in which the value is a constant.

namespace flash {

// The kind `split` is left out: its kernel is chosen by run_mha_fwd_splitkv_dispatch.
template <typename Function>
void call_with_kind(Kind kind, const Function &function) {
    switch (kind) {
#define FLASH_KIND_CASE(NAME, ...)                                \
    case Kind::NAME:                                              \
        if constexpr (Kind::NAME != Kind::split) {                \
            function(std::integral_constant<Kind, Kind::NAME>()); \
        }                                                         \
        return;
        FLASH_KINDS(FLASH_KIND_CASE)
#undef FLASH_KIND_CASE
    }
}

}  // namespace flash

// KIND_SWITCH(kind, [&] { f<kKind>(); })
#define KIND_SWITCH(KIND, ...)                                                 \
    ::flash::call_with_kind((KIND), [&](auto kind_constant) {                  \
        constexpr static ::flash::Kind kKind = decltype(kind_constant)::value; \
        __VA_ARGS__();                                                         \
    })

#define FP16_CASE(DTYPE, NAME, ...)                                        \
    if constexpr (::flash::is_built(::flash::DType::NAME)) {               \
        if ((DTYPE) == ::flash::DType::NAME) {                             \
            constexpr static ::flash::DType kDType = ::flash::DType::NAME; \
            return __VA_ARGS__();                                          \
        }                                                                  \
    }

// FP16_SWITCH(dtype, [&] { f<kDType>(); }): float16 or bfloat16, if it is built.
#define FP16_SWITCH(DTYPE, ...)                 \
    [&] {                                       \
        FP16_CASE(DTYPE, float16, __VA_ARGS__)  \
        FP16_CASE(DTYPE, bfloat16, __VA_ARGS__) \
    }()

#define HEADDIM_CASE(HEADDIM, SIZE, ...)          \
    if constexpr (::flash::is_built(SIZE)) {      \
        if ((HEADDIM) <= SIZE) {                  \
            constexpr static int kHeadDim = SIZE; \
            return __VA_ARGS__();                 \
        }                                         \
    }

// HEADDIM_SWITCH(d, [&] { f<kHeadDim>(); }): the smallest built head dim that holds d.
#define HEADDIM_SWITCH(HEADDIM, ...)            \
    [&] {                                       \
        HEADDIM_CASE(HEADDIM, 32, __VA_ARGS__)  \
        HEADDIM_CASE(HEADDIM, 64, __VA_ARGS__)  \
        HEADDIM_CASE(HEADDIM, 96, __VA_ARGS__)  \
        HEADDIM_CASE(HEADDIM, 128, __VA_ARGS__) \
        HEADDIM_CASE(HEADDIM, 192, __VA_ARGS__) \
        HEADDIM_CASE(HEADDIM, 256, __VA_ARGS__) \
    }()

// ---- from params to a kernel

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
    FLASH_CHECK(built_headdim_for(largest_headdim(params)) != 0, "no kernel was compiled for headdim ",
                largest_headdim(params), "; compiled: ", list_of(kBuiltHeadDims),
                "; build them all with: FLASH_ATTN_MINI_HDIMS= pip install .");
}

// reason: against sm90; null: none.
void trace_arch(const char *function, const char *reason, int headdim, Kind kind) {
    if (trace_enabled()) {
        const bool is_sm90 = reason == nullptr;
        trace(function, "device=cuda arch=%s kHeadDim=%d kKind=%s%s%s", is_sm90 ? "sm90" : "sm80", headdim,
              name_of(kind), is_sm90 ? "" : " because: ", is_sm90 ? "" : reason);
    }
}

void trace_single_tile(const char *function, int headdim) {
    if (trace_enabled()) {
        trace(function, "device=cuda single_tile kHeadDim=%d", headdim);
    }
}

// The work tile counter of a forward with variable lengths or key_ranges, set to 0. It must live until the kernel is
// launched.
at::Tensor zero_counter(cudaStream_t stream) {
    const at::TensorOptions options(c10::Device(at::kCUDA, current_device()));
    const at::Tensor counter = at::empty({1}, options.dtype(at::kInt));
    set_to_zero(counter.data_ptr(), sizeof(int), stream);
    return counter;
}

// The counters and semaphores of a backward, which lie in one piece of its scratch (CudaScratch).
void zero_scratch(const Flash_bwd_params &params, cudaStream_t stream) {
    const auto *begin = reinterpret_cast<const char *>(params.work_counts),
               *end = reinterpret_cast<const char *>(params.lse_padded);
    set_to_zero(params.work_counts, end - begin, stream);
}

// Only calls with key_ranges have scratch for them.
void prepare_key_ranges(const Flash_fwd_params &params, cudaStream_t stream) {
    const KeyRanges &ranges = params.key_ranges;
    if (ranges.is_used()) {
        if (ranges.columns != nullptr) {
            set_to_zero(ranges.columns, ranges.columns_bytes, stream);
        }
        run_prepare_key_ranges(params, stream);
    }
}

void run_mha_fwd_cuda(Flash_fwd_params &params) {
    check_built(params);
    const cudaStream_t stream = current_stream();
    prepare_key_ranges(params, stream);
    FP16_SWITCH(params.dtype, [&] {
        HEADDIM_SWITCH(largest_headdim(params), [&] {
            if constexpr (has_single_tile(kHeadDim)) {
                if (takes_single_tile(params)) {
                    trace_single_tile("run_mha_fwd", kHeadDim);
                    run_flash_fwd_single_tile<kDType, kHeadDim>(params, stream);
                    return;
                }
            }
            KIND_SWITCH(kind_of(params), [&] {
                constexpr bool kHasKernelSm90 = has_sm90_fwd(kHeadDim, kKind);
                const char *reason = reason_against_sm90(params, kHasKernelSm90);
                trace_arch("run_mha_fwd", reason, kHeadDim, kKind);
                if constexpr (kHasKernelSm90) {
                    if (reason == nullptr) {
                        const std::vector<at::Tensor> copies = copy_for_tma(params);  // live until the launch
                        const bool has_counter = params.cu_seqlens_q != nullptr || params.key_ranges.is_used() ||
                                                 (has_bias(kKind) && params.is_local());
                        const at::Tensor counter = has_counter ? zero_counter(stream) : at::Tensor();
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

void run_mha_fwd_splitkv_dispatch(Flash_fwd_params &params, bool follows_append) {
    const CacheKernel kernel = cache_kernel(params);
    if (kernel == CacheKernel::forward) {
        run_mha_fwd_cuda(params);
        return;
    }
    const cudaStream_t stream = current_stream();
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

void run_mha_fwd_latent(const Flash_fwd_params &params) {
    if (trace_enabled()) {
        trace("run_mha_fwd_kvcache", "device=cuda arch=sm90 kHeadDim=%d kHeadDimV=%d", params.d, params.d_v);
    }
    if constexpr (has_latent_decode()) {
        FP16_SWITCH(params.dtype, [&] { sm90::run_flash_fwd_latent<kDType>(params, current_stream()); });
    }
}

void run_mha_fwd_kvcache_cuda(Flash_fwd_params &params) {
    if (is_latent_cache(params)) {
        run_mha_fwd_latent(params);
        return;
    }
    check_built(params);
    const bool appends = params.cache.seqlen_new > 0 || params.cache.rotary_cos != nullptr;
    if (appends) {
        FP16_SWITCH(params.dtype, [&] { run_append_kv<kDType>(params, current_stream()); });
    }
    if (params.seqlen_q > 0) {
        run_mha_fwd_splitkv_dispatch(params, appends);
    }
}

void run_mha_bwd_cuda(Flash_bwd_params &params) {
    check_built(params);
    params.max_smem = max_smem();
    params.has_bulk_reduce = device_properties().major >= 9;
    const cudaStream_t stream = current_stream();
    prepare_key_ranges(params, stream);
    FP16_SWITCH(params.dtype, [&] {
        HEADDIM_SWITCH(largest_headdim(params), [&] {
            if constexpr (has_single_tile(kHeadDim)) {
                if (takes_single_tile(params)) {
                    trace_single_tile("run_mha_bwd", kHeadDim);
                    run_flash_bwd_single_tile<kDType, kHeadDim>(params, stream);
                    return;
                }
            }
            KIND_SWITCH(kind_of(params), [&] {
                constexpr bool kHasKernelSm90 = has_sm90_bwd(kHeadDim, kKind);
                const char *reason = reason_against_sm90(params, kHasKernelSm90);
                trace_arch("run_mha_bwd", reason, kHeadDim, kKind);
                if constexpr (kHasKernelSm90) {
                    if (reason == nullptr) {
                        const std::vector<at::Tensor> copies = copy_for_tma(params);  // live until the launch
                        zero_scratch(params, stream);
                        sm90::run_flash_bwd<kDType, kHeadDim, kKind>(params, stream);
                        if constexpr (sm90::has_dq_pass(kHeadDim, kKind)) {
                            if (params.dq.ptr != nullptr && params.dq_accum == nullptr) {
                                sm90::run_flash_bwd_dq<kDType, kHeadDim, kKind>(params, stream);
                            }
                        }
                        return;
                    }
                }
                if constexpr (has_sm80_bwd(kHeadDim, kKind)) {
                    if (params.dq_semaphore != nullptr) {
                        zero_scratch(params, stream);
                    }
                    sm80::run_flash_bwd<kDType, kHeadDim, kKind>(params, stream);
                }
            });
        });
    });
}

void run_mha_bias_bwd_cuda(Flash_bias_bwd_params &params) {
    check_built(params);
    const cudaStream_t stream = current_stream();
    const at::TensorOptions options(c10::Device(at::kCUDA, current_device()));
    const at::Tensor ranges = key_ranges_scratch(params, at::empty({0}, options), /*is_backward=*/false);
    prepare_key_ranges(params, stream);
    FP16_SWITCH(params.dtype, [&] {
        HEADDIM_SWITCH(params.d, [&] {
            if (trace_enabled()) {
                trace("run_mha_bias_bwd", "device=cuda kHeadDim=%d", kHeadDim);
            }
            sm80::run_bias_gradient<kDType, kHeadDim>(params, stream);
        });
    });
}

}  // namespace

bool run_row_mod_gradient(const Flash_bwd_params &params, void *gradient) {
    const DeviceProperties &gpu = device_properties();
    if (!runs_on(gpu.major, gpu.minor)) {
        return false;
    }
    run_row_mod_gradient(params, gradient, current_stream());
    return true;
}

bool needs_scratch(const Flash_bwd_params &params) {
    return !takes_single_tile(params);
}

bool takes_dq_pass(const Flash_bwd_params &params) {
    bool result = false;
    HEADDIM_SWITCH(largest_headdim(params), [&] {
        KIND_SWITCH(kind_of(params), [&] {
            if constexpr (has_sm90_bwd(kHeadDim, kKind) && sm90::has_dq_pass(kHeadDim, kKind)) {
                const bool is_latent = has_latent_bwd(kHeadDim, kKind) && params.d_v <= kMaxHeadDimVLatent;
                const int passes = requested_passes();
                result = (passes == 0 ? prefers_dq_pass(params) : passes == 2) && !is_latent &&
                         reason_against_sm90(params, /*has_sm90=*/true) == nullptr;
            }
        });
    });
    return result;
}

int64_t splitkv_scratch_floats(const Flash_fwd_params &params) {
    int64_t floats = 0;
    if (is_latent_cache(params)) {
        if constexpr (has_latent_decode()) {
            FP16_SWITCH(params.dtype, [&] { floats = sm90::latent_scratch_floats<kDType>(params); });
        }
        return floats;
    }
    check_built(params);
    const CacheKernel kernel = params.seqlen_q == 0 ? CacheKernel::forward : cache_kernel(params);
    if (kernel == CacheKernel::forward) {
        return 0;
    }
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

std::string reason_against_latent(const Flash_fwd_params &params) {
    if (device_properties().major != 9 || requested_arch() == 80) {
        return "its kernel needs a Hopper GPU, and FLASH_ATTN_MINI_ARCH other than 80";
    }
    if (!has_latent_decode() || !is_built(params.dtype)) {
        return "this build lacks its kernel, which comes with those of headdim 192 for 90a";
    }
    const auto has_strides_of_k = [&](const TensorRef &x) {
        return x.batch_stride == params.k.batch_stride && x.row_stride == params.k.row_stride &&
               x.head_stride == params.k.head_stride;
    };
    if (params.v.ptr != params.k.ptr || !has_strides_of_k(params.v)) {
        return "v_cache is not k_cache[..., :512]";
    }
    if (params.cache.num_splits != 0 || params.cache.split_keys != 0) {
        return "num_splits or split_keys is given";
    }
    if (!can_pack_rows(params)) {
        return "alibi_slopes is given, or there are more than 2^31 rows of queries and heads";
    }
    if (!is_aligned(params.q, params.d) || (params.o.ptr != nullptr && !is_aligned(params.o, params.d_v))) {
        return "rows of q or out do not begin at multiples of 16 bytes";
    }
    return sm90::can_split(params) ? ""
                                   : "TMA cannot read the cache: its strides, cache_leftpad with pages, or pages "
                                     "whose keys are no multiple of 8";
}

bool takes_own_headdim_v(int64_t d, int64_t d_v) {
    constexpr int kVector = 8;  // elements that kernels load and store together
    const int headdim = built_headdim_for(static_cast<int>(std::max(d, d_v)));
    return d % kVector == 0 && d_v % kVector == 0 && has_sm90_fwd(headdim, Kind::full) &&
           device_properties().major == 9 && requested_arch() != 80;
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

bool needs_scratch(const Flash_bwd_params &) {
    return false;
}

bool takes_dq_pass(const Flash_bwd_params &) {
    return false;
}

std::string reason_against_latent(const Flash_fwd_params &) {
    return "this build has no CUDA kernels";
}

bool takes_own_headdim_v(int64_t, int64_t) {
    return false;
}

constexpr char kNoCuda[] =
    "this build has no CUDA kernels; with a CUDA build of torch, and nvcc or the wheel flash_attn_mini_kernels, build "
    "them with: ";

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

void run_mha_bias_bwd(Flash_bias_bwd_params &params, c10::Device device) {
    if (device.is_cpu()) {
        if (trace_enabled()) {
            trace("run_mha_bias_bwd", "device=cpu d=%d is_causal=%s", params.d, name_of(params.is_causal));
        }
        run_mha_bias_bwd_cpu(params);
        return;
    }
#ifdef FLASH_WITH_CUDA
    run_mha_bias_bwd_cuda(params);
#else
    FLASH_CHECK(false, kNoCuda, "pip install .");
#endif
}

}  // namespace flash
