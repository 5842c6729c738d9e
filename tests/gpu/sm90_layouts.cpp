// Checks the layouts of csrc/sm90 without a GPU: CuTe's layouts are functions that also run on the host. Prints one
// line per tile with the number of elements in a wrong place. test_sm90_layouts.py compiles and runs it.
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
int __reduce_add_sync(unsigned, int x) {
    return x;
}
int __reduce_max_sync(unsigned, int x) {
    return x;
}
unsigned __ballot_sync(unsigned, int x) {
    return x != 0;
}
int __shfl_sync(unsigned, int x, int) {
    return x;
}
int __shfl_xor_sync(unsigned, int x, int) {
    return x;
}
int __popc(unsigned) {
    return 0;
}
int __ffs(int) {
    return 0;
}
int __clz(int) {
    return 0;
}
int __float_as_int(float) {
    return 0;
}
int atomicAdd(int *, int) {
    return 0;
}
template <typename T>
T __ldg(const T *x) {
    return *x;
}
void __syncwarp() {}
using std::max, std::min;

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // as flash_fwd_instantiation.cu, for head dim 256
#include "sm90/common/accumulator.h"
#include "sm90/forward/kernel_traits.h"

namespace flash::sm90 {

template <int kHeadDim, bool kIsLocal>
void check() {
    using Traits = Flash_fwd_kernel_traits<DType::bfloat16, kHeadDim, TileSizesFwd<kHeadDim, kIsLocal>>;
    constexpr int kBlockN = Traits::kBlockN, kRows = Traits::kRows;
    const auto identity = make_identity_tensor(typename Traits::TileS{});
    int wrong = 0;
    for (int thread = 0; thread < 128; ++thread) {
        // A thread's registers of the accumulator S hold the same elements as its registers of the A operand P.
        Tensor of_S = typename Traits::TiledMmaQK{}.get_slice(thread).partition_C(identity);
        Tensor of_P = typename Traits::TiledMmaPV{}.get_slice(thread).partition_A(identity);
        Tensor as_operand = make_tensor(of_S.data(), operand_A_layout(of_S.layout()));
        wrong += size(as_operand) != size(of_P) || size<2>(as_operand) != size<2>(of_P);
        for (int i = 0; i < size(of_P); ++i) {
            wrong += as_operand(i) != of_P(i);
        }
        // rowcol_layout: elements of a row have one row index, elements of a column one column index.
        Tensor rowcol = make_tensor(of_S.data(), rowcol_layout(of_S.layout()));
        for (int row = 0; row < size<0>(rowcol); ++row) {
            for (int col = 0; col < size<1>(rowcol); ++col) {
                wrong += get<0>(rowcol(row, col)) != get<0>(rowcol(row, 0));
                wrong += get<1>(rowcol(row, col)) != get<1>(rowcol(0, col));
            }
        }
    }
    // columns_before counts the columns of a thread that lie before a key.
    for (threadIdx.x = 0; threadIdx.x < 128; ++threadIdx.x) {
        Tensor of_S = typename Traits::TiledMmaQK{}.get_slice(int(threadIdx.x)).partition_C(identity);
        Tensor rowcol = make_tensor(of_S.data(), rowcol_layout(of_S.layout()));
        for (int key = -9; key < kBlockN + 9; ++key) {
            int before = 0;
            for (int col = 0; col < size<1>(rowcol); ++col) {
                before += get<1>(rowcol(0, col)) < key;
            }
            wrong += std::min(columns_before(key), int(size<1>(rowcol))) != before;
        }
    }
    // round_P assumes that the registers of P have the order of those of S.
    Tensor acc_s = partition_fragment_C(typename Traits::TiledMmaQK{}, typename Traits::TileS{});
    for (int i = 0; i < size(acc_s); ++i) {
        wrong += int(acc_s.layout()(i)) != i;
    }
    wrong += int(cosize(operand_A_layout(acc_s.layout()))) != int(size(acc_s));
    // SmemLayoutVt is the transpose of SmemLayoutV.
    const typename Traits::SmemLayoutV v;
    const typename Traits::SmemLayoutVt vt;
    for (int stage = 0; stage < Traits::kStages; ++stage) {
        for (int key = 0; key < kBlockN; ++key) {
            for (int column = 0; column < kHeadDim; ++column) {
                wrong += int(v(key, column, stage)) != int(vt(column, key, stage));
            }
        }
    }
    // first_row_of_thread, which the mask and the epilogue use, and the columns of O that the epilogue stores.
    for (int thread = 0; thread < 128; ++thread) {
        threadIdx.x = thread;
        Tensor of_O =
            typename Traits::TiledMmaPV{}.get_slice(thread).partition_C(make_identity_tensor(typename Traits::TileQ{}));
        Tensor rowcol = make_tensor(of_O.data(), rowcol_layout(of_O.layout()));
        wrong += size<0>(rowcol) != 2 || size<1>(rowcol) != kHeadDim / 4;
        for (int row = 0; row < size<0>(rowcol); ++row) {
            for (int col = 0; col < size<1>(rowcol); ++col) {
                wrong += get<0>(rowcol(row, col)) != first_row_of_thread() + row * 8;
                wrong += get<1>(rowcol(row, col)) != col / 2 * 8 + thread % 4 * 2 + col % 2;
            }
        }
    }
    std::printf("headdim=%d is_local=%d wrong=%d\n", kHeadDim, kIsLocal, wrong);
}

}  // namespace flash::sm90

int main() {
    flash::sm90::check<64, false>();
    flash::sm90::check<96, false>();  // rows of 64 bytes
    flash::sm90::check<128, false>();
    flash::sm90::check<256, true>();  // kBlockN is no power of two
}
