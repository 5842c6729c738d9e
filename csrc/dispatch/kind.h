// The kinds of kernel, listed once: each specialises for one kind of call. build_tools/kernels.py reads FLASH_KINDS and
// kMinHeadDimSm90 from this file. The file includes neither CUDA nor torch. docs/tuning says what each specialisation
// is worth.
#pragma once

namespace flash {

// X(name, sm80 forward, sm80 backward, sm90 forward, sm90 backward): 1 where a kernel takes the calls of the kind.
#define FLASH_KINDS(X)     \
    X(full, 1, 1, 1, 1)    \
    X(local, 1, 1, 1, 1)   \
    X(varlen, 1, 1, 1, 1)  \
    X(general, 1, 1, 1, 1) \
    X(ranged, 1, 1, 1, 1)  \
    X(paged, 1, 0, 0, 0)   \
    X(split, 0, 0, 1, 0)   \
    X(biased, 1, 1, 1, 1)

enum class Kind {
    full,     // equal lengths; every query sees every key
    local,    // equal lengths; causal or windowed; sm90 backward: every query sees a key
    varlen,   // any lengths and mask
    general,  // any lengths and mask; score modifiers, dropout and max_logits are decided at run time
    ranged,   // general, with key_ranges
    paged,    // general, with keys in pages
    split,    // a cache: the query heads of a group in one tile, keys split over the CTAs; score modifiers at run time
    biased,   // general, with attn_bias, and with key_ranges or without
};

// True if the keys that a query sees may depend on the query.
constexpr bool is_local(Kind kind) {
    return kind != Kind::full;
}

// True if score modifiers are decided at run time, and dropout too, except for split.
constexpr bool is_general(Kind kind) {
    return kind == Kind::general || kind == Kind::ranged || kind == Kind::biased || kind == Kind::paged ||
           kind == Kind::split;
}

constexpr bool may_be_varlen(Kind kind) {
    return kind == Kind::varlen || is_general(kind);
}

// True if the keys that a query sees come from key_ranges (common/key_ranges.h).
constexpr bool has_ranges(Kind kind) {
    return kind == Kind::ranged;
}

// True if scores get a bias (common/attn_bias.h). Such calls may have key_ranges too: the kernel decides at run time,
// and applies them to each score.
constexpr bool has_bias(Kind kind) {
    return kind == Kind::biased;
}

constexpr const char *name_of(Kind kind) {
#define FLASH_KIND_NAME(NAME, ...) #NAME,
    constexpr const char *kNames[] = {FLASH_KINDS(FLASH_KIND_NAME)};
#undef FLASH_KIND_NAME
    return kNames[static_cast<int>(kind)];
}

// The columns of FLASH_KINDS.
struct KernelsOfKind {
    bool sm80_fwd, sm80_bwd, sm90_fwd, sm90_bwd;
};

constexpr KernelsOfKind kernels_of(Kind kind) {
#define FLASH_KIND_KERNELS(NAME, ...) {__VA_ARGS__},
    constexpr KernelsOfKind kKernels[] = {FLASH_KINDS(FLASH_KIND_KERNELS)};
#undef FLASH_KIND_KERNELS
    return kKernels[static_cast<int>(kind)];
}

// The kind of the sm90 forward kernel that takes the calls of `kind`.
constexpr Kind kind_of_sm90_fwd(Kind kind) {
    return kind == Kind::varlen ? Kind::general : kind;
}

// Smaller head dims run on the kernels of sm80.
constexpr int kMinHeadDimSm90 = 64;

// The sm90 kernels compute with the larger head dim where q and v have different ones: TMA reads the missing columns as
// zeros. Multi-head latent attention has kernels that compute only the columns of v: up to kHeadDimLatent columns of q
// and k, up to kMaxHeadDimVLatent of v. In the backward a cap, dropout, ranges and a bias would take more registers
// than such a kernel has left.
constexpr int kHeadDimLatent = 192, kMaxHeadDimVLatent = 128;
constexpr bool has_latent_fwd(int headdim, Kind kind) {
    return headdim == kHeadDimLatent && (kind == Kind::full || kind == Kind::local || kind == Kind::general);
}
constexpr bool has_latent_bwd(int headdim, Kind kind) {
    return headdim == kHeadDimLatent && !is_general(kind);
}

}  // namespace flash
