// Checks the layouts of the sm90 backward without a GPU, like sm90_layouts.cpp. Prints one line per head dim with the
// number of elements in a wrong place. test_sm90_layouts.py compiles and runs it.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>

// The kernels' headers use these names. The functions checked here call none of the stubs.
uint3 threadIdx{};
const uint3 blockIdx{};
const dim3 gridDim{};
unsigned __reduce_or_sync(unsigned, unsigned x) {
    return x;
}
int __shfl_sync(unsigned, int x, int) {
    return x;
}
int atomicAdd(int *, int) {
    return 0;
}
void __syncwarp() {}
using std::max, std::min;

#include "sm90/backward/kernel_traits_bwd.h"

namespace flash::sm90 {

// line_of_row() is the line where TMA and wgmma find a row of Q, or of dO. The load warp writes zeros there.
template <typename Traits, typename Tiles, int kStages>
int wrong_places() {
    constexpr int kTile = Traits::kBlockM * Tiles::kColumns;
    alignas(Traits::kAlignment) static typename Traits::Element q[kStages * kTile];
    const Tensor sQ = make_tensor(make_smem_ptr(q), typename Tiles::template SmemLayoutQ<kStages>{});
    int wrong = 0;
    for (int stage = 0; stage < kStages; ++stage) {
        for (int row = 0; row < Traits::kBlockM; ++row) {
            for (int column = 0; column < Tiles::kColumns; column += 8) {  // 16 bytes
                const auto place = &sQ(row, column, stage) - (q + stage * kTile + Traits::line_of_row(row, column));
                wrong += place < 0 || place >= Traits::kSmemRow;
            }
        }
    }
    return wrong;
}

// A pair of CTAs. The keys of each are contiguous in dS, which bulk copies send. Half of the columns of Q or dO lies
// behind the other half, each in the layout of half a tile.
template <typename Traits>
int wrong_places_of_pair() {
    using Element = typename Traits::Element;
    constexpr int kRows = Traits::kBlockM, kColumns = Traits::kColumnsOfCta, kHalf = kRows * kColumns;
    constexpr int kOfCta = kRows * Traits::kKeysOfCta;
    alignas(Traits::kAlignment) static Element q[Traits::kStagesQ * Traits::kCtas * kHalf];
    alignas(Traits::kAlignment) static Element ds[Traits::kStagesdS * Traits::kCtas * kOfCta];
    const Tensor sQ =
        make_tensor(make_smem_ptr(q), typename Traits::TilesQK::template SmemLayoutQ<Traits::kStagesQ>{});
    const Tensor sdS = make_tensor(make_smem_ptr(ds), typename Traits::SmemLayoutdS{});
    int wrong = 0;
    for (int rank = 0; rank < Traits::kCtas; ++rank) {
        for (int row = 0; row < kRows; ++row) {
            for (int stage = 0; stage < Traits::kStagesQ; ++stage) {
                Element *const half = q + (stage * Traits::kCtas + rank) * kHalf;
                const Tensor sHalf = make_tensor(make_smem_ptr(half), typename Traits::SmemLayoutHalf{});
                for (int column = 0; column < kColumns; column += 8) {
                    wrong += &sQ(row, rank * kColumns + column, stage) != &sHalf(row, column, 0);
                }
            }
            for (int stage = 0; stage < Traits::kStagesdS; ++stage) {
                for (int key = 0; key < Traits::kKeysOfCta; key += 8) {
                    const auto place = &sdS(row, rank * Traits::kKeysOfCta + key, stage) - ds;
                    wrong += place / kOfCta != stage * Traits::kCtas + rank;
                }
            }
        }
    }
    return wrong;
}

template <typename Traits>
void check_traits() {
    static_assert(Traits::kRowsPerTile % Flash_bwd_params::kRowsRounded == 0, "tiles of whole padded row blocks");
    static_assert(!has_kernel_per_factors(Traits::kHeadDim) || Traits::kConsumersComputeDq,
                  "consumers of BwdSplit::products would not wait for a dropout warpgroup");
    int wrong = wrong_places<Traits, typename Traits::TilesQK, Traits::kStagesQ>() +
                wrong_places<Traits, typename Traits::TilesdOV, Traits::kStagesdO>();
    if constexpr (Traits::kCtas > 1) {
        wrong += wrong_places_of_pair<Traits>();
    }
    std::printf("headdim=%d wrong=%d\n", Traits::kHeadDim, wrong);
}

template <int kHeadDim>
void check() {
    check_traits<Flash_bwd_kernel_traits<DType::bfloat16, kHeadDim, Factors::none>>();
}

}  // namespace flash::sm90

int main() {
    flash::sm90::check<64>();
    flash::sm90::check<96>();  // rows of 64 bytes
    flash::sm90::check<128>();
    flash::sm90::check<192>();
    flash::sm90::check<256>();
    using namespace flash;
    sm90::check_traits<sm90::Flash_bwd_kernel_traits<DType::bfloat16, kHeadDimLatent, sm90::Factors::none,
                                                     kMaxHeadDimVLatent, sm90::TileSizesBwdLatent>>();
    sm90::check_traits<sm90::Flash_bwd_kernel_traits<DType::bfloat16, 256, sm90::Factors::none, 256,
                                                     sm90::TileSizesBwdPair>>();
}
