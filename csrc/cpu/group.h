// The rows and keys of one group (kernels.h), and their addresses in the tensors.
#pragma once

#include "key_range.h"
#include "rows.h"

namespace flash::cpu::FLASH_CPU_NAMESPACE {

constexpr int round_up(int64_t x, int multiple) {
    return int((x + multiple - 1) / multiple * multiple);
}

// Allocates arrays in a thread's scratch memory. Without memory it only counts bytes.
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
    Sequence seq = sequence(params, int(bidb));

    int64_t rows() const { return int64_t(seq.seqlen_q) * params.h_h_k_ratio; }
    int64_t query(int64_t row) const { return row / params.h_h_k_ratio; }
    int64_t head(int64_t row) const { return bidh_k * params.h_h_k_ratio + row % params.h_h_k_ratio; }
    KeyRange keys_seen(int64_t row) const { return KeyRange(params, seq, query(row)); }
    // The rows [begin_row(), end_row()) see at least one key. The others get output 0 and no gradient, and give none.
    int64_t begin_row() const { return QueryRange(params, seq, 0, seq.seqlen_k).lo * params.h_h_k_ratio; }
    int64_t end_row() const { return QueryRange(params, seq, 0, seq.seqlen_k).hi * params.h_h_k_ratio; }

    // First element of a row of q or o, or of a key of k or v.
    Element *row_ptr(const TensorRef &t, int64_t row) const {
        return static_cast<Element *>(t.ptr) + bidb * t.batch_stride + (seq.q_begin + query(row)) * t.row_stride +
               head(row) * t.head_stride;
    }
    Element *key_ptr(const TensorRef &t, int64_t key) const {
        Element *const of_head = static_cast<Element *>(t.ptr) + bidh_k * t.head_stride;
        if (params.block_table == nullptr) {
            return of_head + seq.k_bidb * t.batch_stride + (seq.k_begin + key) * t.row_stride;
        }
        const int64_t place = seq.k_begin + key;
        const int64_t page = params.block_table[bidb * params.block_table_batch_stride + place / params.page_size];
        return of_head + page * t.batch_stride + place % params.page_size * t.row_stride;
    }
    // Index of a row in softmax_lse.
    int64_t lse_index(int64_t row) const {
        return bidb * params.lse_batch_stride + head(row) * params.lse_head_stride + seq.q_begin + query(row);
    }
};

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
