// The rows and keys of one group (row_block.h): where they lie in the tensors, which keys a row sees.
#pragma once

#include <algorithm>

#include "rows.h"

namespace flash::cpu::FLASH_CPU_NAMESPACE {

constexpr int round_up(int64_t x, int multiple) {
    return int((x + multiple - 1) / multiple * multiple);
}

// Hands out pieces of a thread's scratch memory. Without memory it only counts.
class Scratch {
public:
    explicit Scratch(char *memory) : memory_(memory) {}

    template <typename T>
    void take(T *&ptr, int64_t count) {
        if (memory_ != nullptr) ptr = reinterpret_cast<T *>(memory_ + end_);
        end_ += (sizeof(T) * size_t(count) + 63) / 64 * 64;
    }
    size_t bytes() const { return end_; }
    bool is_counting() const { return memory_ == nullptr; }

private:
    char *const memory_;
    size_t end_ = 0;
};

template <typename Element>
struct Group {
    const Flash_fwd_params &params;
    int64_t bidb, bidh_k;

    int64_t rows() const { return int64_t(params.seqlen_q) * params.h_h_k_ratio; }
    int64_t query(int64_t row) const { return row / params.h_h_k_ratio; }
    int64_t head(int64_t row) const { return bidh_k * params.h_h_k_ratio + row % params.h_h_k_ratio; }

    // First element of a row of q or o, of a key of k or v.
    Element *row_ptr(const TensorRef &t, int64_t row) const {
        return static_cast<Element *>(t.ptr) + bidb * t.batch_stride + query(row) * t.row_stride +
               head(row) * t.head_stride;
    }
    Element *key_ptr(const TensorRef &t, int64_t key) const {
        return static_cast<Element *>(t.ptr) + bidb * t.batch_stride + key * t.row_stride + bidh_k * t.head_stride;
    }
    // In [b, h, row_length], as softmax_lse is.
    int64_t row_index(int64_t row, int64_t row_length) const {
        return (bidb * params.h + head(row)) * row_length + query(row);
    }
};

// The keys [lo, hi) that a query sees. Both rise with the query.
struct KeyRange {
    int64_t lo, hi;

    KeyRange(const Flash_fwd_params &params, int64_t query) {
        const int64_t diagonal = query + params.seqlen_k - params.seqlen_q;
        lo = params.window_size_left < 0 ? 0 : diagonal - params.window_size_left;
        hi = params.window_size_right < 0 ? params.seqlen_k : diagonal + params.window_size_right + 1;
        lo = std::clamp<int64_t>(lo, 0, params.seqlen_k);
        hi = std::clamp<int64_t>(hi, 0, params.seqlen_k);
    }
    bool is_empty() const { return lo >= hi; }
};

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
