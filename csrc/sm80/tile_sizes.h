// Tile sizes of the sm80 forward per head dim: the one table. docs/tuning.md says how they were found.
#pragma once

namespace flash::sm80 {

template <int kBlockM_, int kBlockN_, int kNWarps_, int kMinBlocksPerSM_, bool kSpares_registers_ = false,
          int kQ_steps_in_registers_ = 0>
struct Tile_fwd {
    static constexpr int kBlockM = kBlockM_;                  // query rows of a thread block
    static constexpr int kBlockN = kBlockN_;                  // keys of a step
    static constexpr int kNWarps = kNWarps_;                  // warps, 16 rows each at a time
    static constexpr int kMinBlocksPerSM = kMinBlocksPerSM_;  // what the register count has to allow
    // Recompute addresses in every step: up to 4 % slower, for tiles that would spill.
    static constexpr bool kSpares_registers = kSpares_registers_;
    // How many 16-wide slices of Q stay in registers over the loop: less to read where shared memory is the limit.
    static constexpr int kQ_steps_in_registers = kQ_steps_in_registers_;
};

// The kinds that have extras want fewer registers for the tile.
template <int kHeadDim, bool kHas_extras>
struct Tile_sizes_fwd;

template <bool kHas_extras>
struct Tile_sizes_fwd<32, kHas_extras> : Tile_fwd<128, 64, 4, 3> {};
template <>
struct Tile_sizes_fwd<64, false> : Tile_fwd<128, 128, 4, 2> {};
template <>
struct Tile_sizes_fwd<64, true> : Tile_fwd<64, 128, 4, 3> {};
template <bool kHas_extras>
struct Tile_sizes_fwd<96, kHas_extras> : Tile_fwd<128, 64, 4, 2> {};
template <bool kHas_extras>
struct Tile_sizes_fwd<128, kHas_extras> : Tile_fwd<128, 64, 4, 2, true> {};
template <bool kHas_extras>
struct Tile_sizes_fwd<192, kHas_extras> : Tile_fwd<64, 64, 4, 2, false, 12> {};
template <>
struct Tile_sizes_fwd<256, false> : Tile_fwd<64, 64, 4, 2, false, 8> {};
template <>
struct Tile_sizes_fwd<256, true> : Tile_fwd<64, 64, 4, 2, false, 6> {};

}  // namespace flash::sm80
