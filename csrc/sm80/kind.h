// The kinds of call that have kernels of their own; what is rarer is decided at run time, in the kernel of general
// calls. docs/tuning.md has what each is worth.
#pragma once

namespace flash::sm80 {

enum class Kind {
    full,     // every query sees every key
    local,    // causal or with a window
    varlen,   // lengths of each sequence's own, with any mask
    general,  // softcap, ALiBi and dropout, too
    paged,    // any call of the forward: keys in pages, too
};

constexpr bool is_local(Kind kind) {
    return kind != Kind::full;
}

// Whether softcap, ALiBi and dropout are decided at run time.
constexpr bool has_extras(Kind kind) {
    return kind == Kind::general || kind == Kind::paged;
}

constexpr bool may_be_varlen(Kind kind) {
    return kind == Kind::varlen || has_extras(kind);
}

constexpr const char *name_of(Kind kind) {
    constexpr const char *kNames[] = {"full", "local", "varlen", "general", "paged"};
    return kNames[static_cast<int>(kind)];
}

}  // namespace flash::sm80
