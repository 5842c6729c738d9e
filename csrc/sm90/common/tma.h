// Tiles of rows by TMA: descriptors on the host, loads on the device.
#pragma once

#include <cute/tensor.hpp>

#include <cstring>
#include <stdexcept>

#include "flash.h"

namespace flash::sm90 {

using namespace cute;

// TMA reads tensors (seqlen, d, heads, batch). Elements outside of the tensor become zeros.
template <typename Element>
using GlobalTensor = decltype(make_tensor(make_gmem_ptr(static_cast<const Element *>(nullptr)),
                                          Shape<int, int, int, int>{}, Stride<int64_t, _1, int64_t, int64_t>{}));
// Op: SM90_TMA_LOAD, or SM90_TMA_LOAD_MULTICAST for loads into several CTAs of a cluster.
template <typename Element, typename SmemLayout, typename Tile, typename Op = SM90_TMA_LOAD>
using TmaLoad = decltype(make_tma_copy(Op{}, GlobalTensor<Element>{}, SmemLayout{}, Tile{}, _1{}));

// A tensor (seqlen, d, heads, batch); varlen (total, d, heads, 1). The stride of a dimension of one element has no
// meaning, and TMA may not accept it: it is replaced.
template <typename Element>
auto global_tensor(const TensorRef &x, int64_t rows, int d, int heads, int batch) {
    const auto stride = [](int size, int64_t stride) { return size > 1 ? stride : int64_t(16 / sizeof(Element)); };
    return make_tensor(make_gmem_ptr(static_cast<const Element *>(x.ptr)),
                       make_shape(static_cast<int>(rows), d, heads, batch),
                       make_stride(stride(static_cast<int>(rows), x.row_stride), _1{}, stride(heads, x.head_stride),
                                   stride(batch, x.batch_stride)));
}

// The descriptor for tiles of `x`. cuTensorMapEncodeTiled leaves it empty when it fails, and CuTe only asserts.
template <typename Element, typename SmemLayout, typename Tile, typename Op = SM90_TMA_LOAD>
TmaLoad<Element, SmemLayout, Tile, Op> make_tma_load(const TensorRef &x, int64_t rows, int d, int heads, int batch) {
    const auto tma = make_tma_copy(Op{}, global_tensor<Element>(x, rows, d, heads, batch), SmemLayout{}, Tile{}, _1{});
    const TmaDescriptor empty{};
    if (std::memcmp(tma.get_tma_descriptor(), &empty, sizeof(empty)) == 0) {
        throw std::runtime_error("flash_attn_mini: cuTensorMapEncodeTiled does not accept the tensors of this call");
    }
    return tma;
}

// Loads the rows of one head from first_row on, and their columns from first_column on, into stage `stage` of sX (row,
// column, stage). One thread calls it; TMA completes `barrier`. With SM90_TMA_LOAD_MULTICAST the CTAs of `ctas`, a bit
// for each rank, get the tile at the same place of their shared memory, and TMA completes their barriers.
template <typename TMA, typename Tile, typename TensorX>
__device__ __forceinline__ void load_rows(const TMA &tma, Tile tile, const TensorX &sX, int stage, uint64_t &barrier,
                                          int first_row, int bidh, int bidb, int first_column = 0, uint16_t ctas = 0) {
    Tensor mX = tma.get_tma_tensor(append<4>(tile, _1{}));                                       // coordinates
    Tensor gX = domain_offset(make_coord(first_row, first_column, bidh, bidb), mX)(_, _, 0, 0);  // (row, column)
    const auto of_X = tma_partition(tma, _0{}, cute::Layout<_1>{},  // pairs of (TMA), (TMA, stage)
                                    group_modes<0, 2>(sX), group_modes<0, 2>(gX));
    copy(tma.with(barrier, ctas), get<0>(of_X), get<1>(of_X)(_, stage));
}

}  // namespace flash::sm90
