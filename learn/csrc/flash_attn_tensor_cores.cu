// The kernel to read second: the loop of flash_attn_minimal.cu with both products on tensor cores, in CuTe. Nothing
// overlaps: a step loads K and V and waits for them, then computes. csrc/sm80 adds copies that overlap the products.
// docs/algorithm.md explains CuTe's names (gQ, sQ, tSrQ) and the layout of a product in registers.
#include "flash_attn_tensor_cores.h"

#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

#include <stdexcept>
#include <string>

namespace flash {
namespace {

using namespace cute;
using Element = cutlass::half_t;

constexpr int kBlockM = 64;  // queries per CTA: 16 for each warp
constexpr int kBlockN = 64;  // keys per step
constexpr int kNWarps = 4;
constexpr int kNThreads = kNWarps * 32;
constexpr int kMaxHeads = 65535;  // of all batch entries: the limit of gridDim.y
constexpr float kLog2E = 1.44269504088896340736f;

template <int kHeadDim>
struct Traits {
    // mma.m16n8k16: a warp multiplies 16 x 16 by 16 x 8. Four warps divide the 64 query rows.
    using TiledMma = TiledMMA<MMA_Atom<SM80_16x8x16_F32F16F16F32_TN>, Layout<Shape<Int<kNWarps>, _1, _1>>,
                              cute::Tile<Int<kBlockM>, _16, _16>>;

    // Tiles of 64 rows in shared memory. Rows of 128 bytes would begin in the same bank; the swizzle permutes the
    // 16-byte pieces of a row by its row number instead of padding it.
    using SwizzledRows = decltype(composition(Swizzle<3, 3, 3>{}, Layout<Shape<_8, _64>, Stride<_64, _1>>{}));
    using SmemLayout = decltype(tile_to_shape(SwizzledRows{}, Shape<_64, Int<kHeadDim>>{}));  // (row, column)
    using SmemLayoutVt =
        decltype(composition(SmemLayout{}, make_layout(Shape<Int<kHeadDim>, _64>{}, LayoutRight{})));  // (column, key)

    // Global memory to shared memory through registers: 16 bytes per thread, eight threads a line of 128 bytes.
    using GmemCopy = decltype(make_tiled_copy(Copy_Atom<UniversalCopy<uint128_t>, Element>{},
                                              Layout<Shape<_16, _8>, Stride<_8, _1>>{}, Layout<Shape<_1, _8>>{}));

    // Shared memory to the registers of a product: ldmatrix, for V transposed on the way.
    using SmemCopy = Copy_Atom<SM75_U32x4_LDSM_N, Element>;
    using SmemCopyTransposed = Copy_Atom<SM75_U16x8_LDSM_T, Element>;
};

// Copies a tile of 64 rows. Rows from rows_left on become zeros; they are not read.
template <int kHeadDim, typename TensorG, typename TensorS>
__device__ void load_tile(const TensorG &gX, TensorS &sX, int rows_left) {
    typename Traits<kHeadDim>::GmemCopy copy_tile;
    auto thread_copy = copy_tile.get_thread_slice(int(threadIdx.x));
    Tensor tXgX = thread_copy.partition_S(gX);                                                 // (CPY, CPY_M, CPY_K)
    Tensor tXsX = thread_copy.partition_D(sX);                                                 // (CPY, CPY_M, CPY_K)
    Tensor tXcX = thread_copy.partition_S(make_identity_tensor(Shape<_64, Int<kHeadDim>>{}));  // (CPY, CPY_M, CPY_K)
    Tensor tXrX = make_tensor<Element>(shape(tXgX));
    clear(tXrX);
    CUTE_UNROLL
    for (int row = 0; row < size<1>(tXgX); ++row) {
        if (get<0>(tXcX(0, row, 0)) < rows_left) {
            copy(copy_tile, tXgX(_, row, _), tXrX(_, row, _));
        }
    }
    copy(copy_tile, tXrX, tXsX);
}

// The four lanes that hold one row of a product.
__device__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

__device__ float row_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

template <int kHeadDim>
__global__ void __launch_bounds__(kNThreads)
    flash_attn_tensor_cores_kernel(const Element *__restrict__ q, const Element *__restrict__ k,
                                   const Element *__restrict__ v, Element *__restrict__ o, int seqlen_q, int seqlen_k,
                                   float scale_log2, bool causal) {
    using T = Traits<kHeadDim>;
    constexpr int kTileSize = 64 * kHeadDim;
    __shared__ alignas(128) Element smem_q[kTileSize], smem_k[kTileSize], smem_v[kTileSize];

    // Tensors: one head in global memory (m), a tile of it (g), a tile in shared memory (s).
    const int m_block = blockIdx.x;
    const size_t head = blockIdx.y;
    const auto head_of = [&](auto *x, int seqlen) {
        return make_tensor(make_gmem_ptr(x + head * seqlen * kHeadDim), make_shape(seqlen, Int<kHeadDim>{}),
                           make_stride(Int<kHeadDim>{}, _1{}));
    };
    using TileShape = Shape<_64, Int<kHeadDim>>;
    Tensor gQ = local_tile(head_of(q, seqlen_q), TileShape{}, make_coord(m_block, 0));  // (BLK_M, HD)
    Tensor gO = local_tile(head_of(o, seqlen_q), TileShape{}, make_coord(m_block, 0));  // (BLK_M, HD)
    Tensor gK = local_tile(head_of(k, seqlen_k), TileShape{}, make_coord(_, 0));        // (BLK_N, HD, n)
    Tensor gV = local_tile(head_of(v, seqlen_k), TileShape{}, make_coord(_, 0));        // (BLK_N, HD, n)
    Tensor sQ = make_tensor(make_smem_ptr(smem_q), typename T::SmemLayout{});           // (BLK_M, HD)
    Tensor sK = make_tensor(make_smem_ptr(smem_k), typename T::SmemLayout{});           // (BLK_N, HD)
    Tensor sV = make_tensor(make_smem_ptr(smem_v), typename T::SmemLayout{});           // (BLK_N, HD)
    Tensor sVt = make_tensor(make_smem_ptr(smem_v), typename T::SmemLayoutVt{});        // (HD, BLK_N)

    // This thread's operands of the products S = Q K^T and O = P V, and their copies from shared memory.
    typename T::TiledMma tiled_mma;
    // int: coordinates get the type of the thread's number, and are compared with numbers of keys that may be negative.
    auto thread_mma = tiled_mma.get_thread_slice(int(threadIdx.x));
    Tensor tSrQ = thread_mma.partition_fragment_A(sQ);    // (MMA, MMA_M, MMA_K)
    Tensor tSrK = thread_mma.partition_fragment_B(sK);    // (MMA, MMA_N, MMA_K)
    Tensor tOrVt = thread_mma.partition_fragment_B(sVt);  // (MMA, MMA_K, MMA_N)
    auto copy_q = make_tiled_copy_A(typename T::SmemCopy{}, tiled_mma);
    auto copy_k = make_tiled_copy_B(typename T::SmemCopy{}, tiled_mma);
    auto copy_v = make_tiled_copy_B(typename T::SmemCopyTransposed{}, tiled_mma);
    auto thread_copy_q = copy_q.get_thread_slice(int(threadIdx.x));
    auto thread_copy_k = copy_k.get_thread_slice(int(threadIdx.x));
    auto thread_copy_v = copy_v.get_thread_slice(int(threadIdx.x));
    Tensor tSsK = thread_copy_k.partition_S(sK);
    Tensor tOsVt = thread_copy_v.partition_S(sVt);
    Tensor tSrK_copy = thread_copy_k.retile_D(tSrK);
    Tensor tOrVt_copy = thread_copy_v.retile_D(tOrVt);

    // A thread holds two rows of every product: values 0 and 1 of a 16 x 8 result lie in one row, 2 and 3 eight rows
    // below. tScS has the (row, key) of each score, tOcO the (row, column) of each output.
    constexpr int kRows = 2;
    Tensor acc_s = partition_fragment_C(tiled_mma, Shape<_64, _64>{});  // (MMA=4, 1, BLK_N / 8)
    Tensor acc_o = partition_fragment_C(tiled_mma, TileShape{});        // (MMA=4, 1, HD / 8)
    Tensor tScS = thread_mma.partition_C(make_identity_tensor(Shape<_64, _64>{}));
    Tensor tOcO = thread_mma.partition_C(make_identity_tensor(TileShape{}));
    static_assert(decltype(size<0>(acc_s))::value == 4 && decltype(size<1>(acc_s))::value == 1);

    // Causal: row i sees the keys up to i + diagonal. The tile's last row sees the most keys.
    const int first_row = m_block * kBlockM;
    const int diagonal = seqlen_k - seqlen_q;
    const int last_row = min(first_row + kBlockM, seqlen_q) - 1;
    const int loop_end = causal ? min(seqlen_k, last_row + diagonal + 1) : seqlen_k;
    int key_end[kRows];
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
        const int query = first_row + get<0>(tScS(2 * row, 0, 0));
        key_end[row] = causal ? min(seqlen_k, query + diagonal + 1) : seqlen_k;
    }

    // Q stays in registers over the loop.
    load_tile<kHeadDim>(gQ, sQ, seqlen_q - first_row);
    __syncthreads();
    copy(copy_q, thread_copy_q.partition_S(sQ), thread_copy_q.retile_D(tSrQ));

    float max_score[kRows] = {-INFINITY, -INFINITY};  // in powers of 2
    float sum[kRows] = {0.f, 0.f};                    // this thread's share
    clear(acc_o);

    for (int n_block = 0; n_block * kBlockN < loop_end; ++n_block) {
        const int first_key = n_block * kBlockN;
        __syncthreads();  // all threads are done with the previous K and V
        load_tile<kHeadDim>(gK(_, _, n_block), sK, seqlen_k - first_key);
        load_tile<kHeadDim>(gV(_, _, n_block), sV, seqlen_k - first_key);
        __syncthreads();  // K and V are complete

        // 1. Scores S = Q K^T, 16 columns of the head dim at a time.
        clear(acc_s);
        CUTE_UNROLL
        for (int i = 0; i < size<2>(tSrQ); ++i) {
            copy(copy_k, tSsK(_, _, i), tSrK_copy(_, _, i));
            gemm(tiled_mma, tSrQ(_, _, i), tSrK(_, _, i), acc_s);
        }

        // 2. Scale and mask; 3. online softmax, as in flash_attn_minimal.cu, in base 2.
        CUTE_UNROLL
        for (int row = 0; row < kRows; ++row) {
            float tile_max = -INFINITY;
            CUTE_UNROLL
            for (int i = 0; i < 2 * size<2>(acc_s); ++i) {
                float &s = acc_s(2 * row + i % 2, 0, i / 2);
                s = first_key + get<1>(tScS(2 * row + i % 2, 0, i / 2)) < key_end[row] ? s * scale_log2 : -INFINITY;
                tile_max = fmaxf(tile_max, s);
            }
            const float new_max = fmaxf(max_score[row], row_max(tile_max));
            const float shift = new_max == -INFINITY ? 0.f : new_max;  // -inf - -inf would be NaN
            const float rescale = exp2f(max_score[row] - shift);
            float tile_sum = 0.f;
            CUTE_UNROLL
            for (int i = 0; i < 2 * size<2>(acc_s); ++i) {
                float &s = acc_s(2 * row + i % 2, 0, i / 2);
                s = exp2f(s - shift);  // acc_s holds P from here on
                tile_sum += s;
            }
            max_score[row] = new_max;
            sum[row] = sum[row] * rescale + tile_sum;
            CUTE_UNROLL
            for (int i = 0; i < 2 * size<2>(acc_o); ++i) acc_o(2 * row + i % 2, 0, i / 2) *= rescale;
        }

        // 4. Output O += P V. Two 16 x 8 results side by side have the layout of a 16 x 16 operand: P stays in
        // registers.
        Tensor tOrP = make_tensor<Element>(Shape<_8, _1, Int<kBlockN / 16>>{});  // (MMA, MMA_M, MMA_K)
        CUTE_UNROLL
        for (int i = 0; i < size<2>(tOrP); ++i) {
            CUTE_UNROLL
            for (int j = 0; j < 8; ++j) tOrP(j, 0, i) = Element(acc_s(j % 4, 0, 2 * i + j / 4));
            copy(copy_v, tOsVt(_, _, i), tOrVt_copy(_, _, i));
            gemm(tiled_mma, tOrP(_, _, i), tOrVt(_, _, i), acc_o);
        }
    }

    // A row without a key has sum 0. Its output is 0, even if acc_o is NaN because of an infinite v.
    Tensor tOgO = thread_mma.partition_C(gO);  // (MMA, 1, HD / 8)
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
        const float total = row_sum(sum[row]);
        if (first_row + get<0>(tOcO(2 * row, 0, 0)) < seqlen_q) {
            CUTE_UNROLL
            for (int i = 0; i < 2 * size<2>(acc_o); ++i) {
                tOgO(2 * row + i % 2, 0, i / 2) =
                    Element(total != 0.f ? acc_o(2 * row + i % 2, 0, i / 2) / total : 0.f);
            }
        }
    }
}

}  // namespace

void run_flash_attn_tensor_cores(const void *q, const void *k, const void *v, void *o, int heads, int seqlen_q,
                                 int seqlen_k, int headdim, float softmax_scale, bool causal, cudaStream_t stream) {
    if (headdim != 64 && headdim != 128) {
        throw std::invalid_argument("flash_attn_tensor_cores: headdim is " + std::to_string(headdim) +
                                    ", must be 64 or 128");
    }
    if (seqlen_q < 0 || seqlen_k < 0 || heads < 0 || heads > kMaxHeads) {
        throw std::invalid_argument("flash_attn_tensor_cores: " + std::to_string(heads) + " heads of " +
                                    std::to_string(seqlen_q) + " queries and " + std::to_string(seqlen_k) +
                                    " keys, must be 0 to " + std::to_string(kMaxHeads) + " heads, none negative");
    }
    if (seqlen_q == 0 || heads == 0) return;  // CUDA rejects an empty grid
    const auto kernel = headdim == 64 ? flash_attn_tensor_cores_kernel<64> : flash_attn_tensor_cores_kernel<128>;
    const dim3 grid((seqlen_q - 1) / kBlockM + 1, heads);
    kernel<<<grid, kNThreads, 0, stream>>>(static_cast<const Element *>(q), static_cast<const Element *>(k),
                                           static_cast<const Element *>(v), static_cast<Element *>(o), seqlen_q,
                                           seqlen_k, softmax_scale * kLog2E, causal);
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) {
        throw std::runtime_error(std::string("flash_attn_tensor_cores: launch: ") + cudaGetErrorString(status));
    }
}

}  // namespace flash
