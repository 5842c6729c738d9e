// Tile sizes of the sm90 forward per head dim: the one table. docs/tuning.md says how they were found.
#pragma once

namespace flash::sm90 {

template <int kConsumers_, int kBlockN_, int kStages_, int kQ_rooms_, bool kTakes_turns_>
struct Tile_fwd {
    static constexpr int kConsumers = kConsumers_;       // consumer warpgroups, 64 query rows each
    static constexpr int kBlockN = kBlockN_;             // keys of a step
    static constexpr int kStages = kStages_;             // tiles of K, and of V, in shared memory
    static constexpr int kQ_rooms = kQ_rooms_;           // tiles of Q: with 2, the next one is there in time
    static constexpr bool kTakes_turns = kTakes_turns_;  // consumers issue their products one after the other
    static constexpr int kBlockM = 64 * kConsumers;
    // setmaxnreg: what the producer gives up, the consumers get.
    static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
    static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
};

template <int kHeadDim, bool kIs_local>
struct Tile_sizes_fwd;

template <bool kIs_local>
struct Tile_sizes_fwd<64, kIs_local> : Tile_fwd<3, 128, 4, 2, true> {};
template <bool kIs_local>
struct Tile_sizes_fwd<96, kIs_local> : Tile_fwd<2, 128, 3, 2, true> {};
template <bool kIs_local>
struct Tile_sizes_fwd<128, kIs_local> : Tile_fwd<2, 128, 2, 2, true> {};
template <bool kIs_local>
struct Tile_sizes_fwd<192, kIs_local> : Tile_fwd<2, 112, 2, 1, false> {};
template <bool kIs_local>
struct Tile_sizes_fwd<256, kIs_local> : Tile_fwd<2, 80, 2, 1, false> {};

// Tiles of fewer rows. Local calls of up to kShort_seqlen queries: longer ones would lose more at the sequence's end
// and under the mask than they gain. Full ones where longer tiles leave multiprocessors idle; a row costs more in short
// ones.
constexpr int kShort_seqlen = 1024;
constexpr double kCost_of_short_tiles = 1.2;
template <int kHeadDim>
struct Tile_sizes_fwd_short : Tile_sizes_fwd<kHeadDim, true> {};
template <>
struct Tile_sizes_fwd_short<64> : Tile_fwd<2, 128, 4, 2, true> {};

}  // namespace flash::sm90
