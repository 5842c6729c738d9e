// The forward of a block of few rows, as in decoding: each step streams K and V once. flash_decode_kernel_fma.h and
// flash_decode_kernel_amx.h derive from it and supply the arithmetic: load_q, step_vecs.
#pragma once

#include "row_block_forward.h"

namespace flash::cpu::FLASH_CPU_NAMESPACE {

// Self: the derived class, with its memory in Self::Shared, which derives from RowBlockDecode::Shared. A step has at
// most kBlockN keys.
template <typename Self, typename Element, int kBlockN>
class RowBlockDecode : public RowBlockForward<Self, Element, kLanes<typename AccOf<Element>::type>, kBlockN> {
    using Base = RowBlockForward<Self, Element, kLanes<typename AccOf<Element>::type>, kBlockN>;
    friend Base;

protected:
    using RowBlockBase = Base;
    using Base::d_, Base::d_v_, Base::params_;
    using typename Base::Acc;
    using typename Base::Panel;
    static constexpr int kPanel = kLanes<Acc>;
    static constexpr int kAhead = 32;  // rows from a prefetch to the use; K and V of a step are one stream
    static constexpr int kElementsOfLine = 64 / int(sizeof(Element));

    // Memory that the heads of a block use in turn.
    struct Shared {
        Acc *o = nullptr;                  // [kMaxRows][d_v]: rows of o, for their conversion
        const Element **stream = nullptr;  // [2 * kBlockN + kAhead + kPanel]: rows of K, then of V

        Shared(Scratch &memory, const Flash_fwd_params &params) {
            memory.take(o, int64_t(kMaxRows) * params.d_v);
            memory.take(stream, 2 * kBlockN + kAhead + kPanel);
        }
    };

public:
    static constexpr int kMaxRows = kPanel;

    // For all heads of the largest block.
    static size_t scratch_bytes(const Flash_fwd_params &params) {
        Scratch memory(nullptr);
        const typename Self::Shared shared(memory, params);
        Self *heads = nullptr;
        memory.take(heads, params.h_k);
        const Self one(params, {0, 0, 0, kMaxRows}, nullptr, shared, 0);
        return memory.bytes() + one.scratch_.bytes() * size_t(params.h_k);
    }

    // The heads take turns key block by key block: their rows of one key are neighbours in a cache [batch, seqlen,
    // heads, headdim].
    static void run(const Flash_fwd_params &params, const RowBlock &block, void *scratch) {
        Scratch memory(static_cast<char *>(scratch));
        const typename Self::Shared shared(memory, params);
        Self *heads = nullptr;
        memory.take(heads, block.heads);
        char *own = static_cast<char *>(scratch) + memory.bytes();
        for (int64_t i = 0; i < block.heads; ++i) {
            const int64_t next = i + 1 < block.heads ? 1 : 1 - block.heads;
            new (heads + i) Self(params, block_of_head(params, block, i), own, shared, next);
            own += heads[i].scratch_.bytes();
            heads[i].begin();
        }
        int n_min = heads->n_min_, n_max = heads->n_max_;
        for (int64_t i = 1; i < block.heads; ++i) {  // with key_ranges, heads may see different keys
            n_min = std::min(n_min, heads[i].n_min_);
            n_max = std::max(n_max, heads[i].n_max_);
        }
        for (int n_begin = n_min; n_begin < n_max; n_begin += kBlockN) {
            for (int64_t i = 0; i < block.heads; ++i) heads[i].visit(n_begin);
        }
        for (int64_t i = 0; i < block.heads; ++i) heads[i].end();
        std::destroy_n(heads, block.heads);
    }

protected:
    // next_head: distance to the head that computes after this one. d_v_padded: columns of o_.
    RowBlockDecode(const Flash_fwd_params &params, const RowBlock &block, char *scratch, const Shared &shared,
                   int64_t next_head, int d_v_padded)
        : Base(params, block, scratch),
          d_v_padded_(d_v_padded),
          stream_(shared.stream),
          next_head_(next_head),
          out_rows_(shared.o) {
        this->scratch_.take(o_, int64_t(kMaxRows) * d_v_padded_);
        if (!this->scratch_.is_counting()) std::fill_n(o_, block.rows * d_v_padded_, Acc(0));
    }

    Acc *out_rows() const { return out_rows_; }

    // rows[i] = l[i] * row i of o.
    void scale_rows(const Panel &p, Acc *const *rows) const {
        for (int i = 0; i < p.rows; ++i) {
            for (int c = 0; c < d_v_; ++c) rows[i][c] = o_[i * d_v_padded_ + c] * p.state.l[i];
        }
    }

    // The addresses of the rows of K, then of V. Prefetches may read a few addresses past the end.
    void load_kv(int n_begin, int n_end) {
        values_ = stream_ + (n_end - n_begin);
        set_addresses(params_.k, n_begin, n_end, stream_);
        set_addresses(params_.v, n_begin, n_end, values_);
        std::fill_n(values_ + (n_end - n_begin), kAhead + kPanel, values_[n_end - n_begin - 1]);
    }

    // The keys of a page are `row_stride` apart, and so are all keys without pages.
    void set_addresses(const TensorRef &t, int n_begin, int n_end, const Element **rows) const {
        for (int n = n_begin; n < n_end;) {
            const Element *row = this->key_ptr(t, n);
            const int64_t left = params_.block_table == nullptr
                                     ? n_end - n
                                     : params_.page_size - (this->group_.seq.k_begin + n) % params_.page_size;
            for (const int end = int(std::min<int64_t>(n + left, n_end)); n < end; ++n, row += t.row_stride)
                *rows++ = row;
        }
    }

    // Prefetches what is used after the n-th value of a step: values, then keys of the next head, key block or split.
    FLASH_INLINE void prefetch_after_value(int n, int n_first, int from, int keys) const {
        const bool is_array = is_dense(params_.v, d_v_);
        if (is_array) prefetch<kToL2>(values_[from + std::min(n, keys - 1)] + kBlockN * d_v_, d_v_);
        if (n < keys) {
            if (!is_array) prefetch(values_[from + n], d_v_);
        } else if (next_head_ > 0) {
            prefetch(stream_[from + std::min(n - keys, keys - 1)] + next_head_ * params_.k.head_stride, d_);
        } else if (n_first + n < this->group_.seq.seqlen_k) {
            prefetch(this->key_ptr(params_.k, n_first + n) + next_head_ * params_.k.head_stride, d_);
        }
    }

    // Prefetches kPanel cache lines of the kPanel keys, for the columns from c on. If the keys are one array, the calls
    // for all columns prefetch it in order. Otherwise a call prefetches one line of each key.
    FLASH_INLINE void prefetch_lines(const Element *const *keys, int c) const {
        if (is_dense(params_.k, d_)) {
            const Element *const lines = keys[0] + c * kPanel;
            for (int i = 0; i < kPanel; ++i) {
                __builtin_prefetch(lines + i * kElementsOfLine + kBlockN * d_, 0, kToL2);
                __builtin_prefetch(lines + i * kElementsOfLine, 0, kToL1);
            }
        } else {
            for (int i = 0; i < kPanel; ++i) __builtin_prefetch(keys[i] + c, 0, kToL1);
        }
    }

    // True if the rows of one head are one array. Then those of the next step are prefetched into L2; with several
    // heads they would not fit. The hardware prefetches values from there.
    bool is_dense(const TensorRef &t, int headdim) const {
        return params_.block_table == nullptr && t.row_stride == headdim;
    }

    static constexpr int kToL2 = 2, kToL1 = 3;  // the locality of __builtin_prefetch
    template <int kTo = kToL1>
    static void prefetch(const Element *row, int headdim) {
        for (size_t i = 0; i < sizeof(Element) * size_t(headdim); i += 64) {
            __builtin_prefetch(reinterpret_cast<const char *>(row) + i, 0, kTo);
        }
    }

    const int d_v_padded_;
    const Element **const stream_;      // rows of K of the current keys, then of V
    const Element **values_ = nullptr;  // those of V
    Acc *o_ = nullptr;                  // [kMaxRows][d_v_padded]

private:
    const int64_t next_head_;
    Acc *const out_rows_;
};

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
