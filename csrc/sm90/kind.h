// The kinds of call that have kernels of their own on Hopper; the others run on those of sm80.
#pragma once

namespace flash::sm90 {

enum class Kind {
    full,     // every query sees every key
    local,    // causal or with a window
    general,  // any mask, softcap, ALiBi, dropout, lengths of each sequence's own: what is rarer is decided at run time
};

constexpr bool is_local(Kind kind) {
    return kind != Kind::full;
}

constexpr bool is_general(Kind kind) {
    return kind == Kind::general;
}

constexpr const char *name_of(Kind kind) {
    constexpr const char *kNames[] = {"full", "local", "general"};
    return kNames[static_cast<int>(kind)];
}

// Head dims that have tiles in tile_sizes.h.
constexpr bool has_headdim(int headdim) {
    return headdim >= 64;
}

}  // namespace flash::sm90
