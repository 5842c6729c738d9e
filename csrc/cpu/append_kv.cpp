// append_kv: copies and rotations, in float (float64: double), rounded once.
#include "append_kv.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstring>
#include <type_traits>

#include "../common/sequence.h"

namespace flash::cpu {
namespace {

constexpr int64_t kGrain = 16;  // rows of all heads that are worth a thread

template <typename Element>
class Append {
    using Acc = std::conditional_t<std::is_same_v<Element, double>, double, float>;

public:
    explicit Append(const Flash_fwd_params &params) : params_(params), cache_(params.cache) {}

    void run() const {
        const bool has_rotary = cache_.rotary_cos != nullptr;
        each_token(cache_.seqlen_new, [&](int bidb, int64_t token) { append(bidb, token); });
        if (has_rotary) {
            each_token(params_.seqlen_q, [&](int bidb, int64_t query) { rotate_query(bidb, query); });
        }
    }

private:
    // Calls function(sequence, token) for every token of every sequence, on all threads.
    template <typename Function>
    void each_token(int64_t tokens, const Function &function) const {
        at::parallel_for(0, params_.b * tokens, kGrain, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) function(int(i / tokens), i % tokens);
        });
    }

    void append(int bidb, int64_t token) const {
        const int64_t place = cache_seqlen(cache_, bidb) + token;  // from the start of the cache row
        if (place >= cache_.capacity) return;
        int64_t row = sequence(params_, bidb).k_bidb, row_in_page = place;
        if (params_.block_table != nullptr) {
            row = params_.block_table[bidb * params_.block_table_batch_stride + place / params_.page_size];
            row_in_page = place % params_.page_size;
        }
        for (int head = 0; head < params_.h_k; ++head) {
            const auto copy = [&](const TensorRef &from, const TensorRef &to, bool is_rotated) {
                const Element *src = at(from, bidb, token, head);
                Element *dst = at(to, row, row_in_page, head);
                is_rotated ? rotate(src, dst, place) : copy_row(src, dst);
            };
            copy(cache_.k_new, params_.k, cache_.rotary_cos != nullptr);
            copy(cache_.v_new, params_.v, false);
        }
    }

    void rotate_query(int bidb, int64_t query) const {
        const int64_t position = cache_seqlen(cache_, bidb) + (cache_.is_rotary_by_query ? query : 0);
        for (int head = 0; head < params_.h; ++head) {
            rotate(at(cache_.q_input, bidb, query, head), at(params_.q, bidb, query, head), position);
        }
    }

    static Element *at(const TensorRef &t, int64_t batch, int64_t row, int64_t head) {
        return static_cast<Element *>(t.ptr) + batch * t.batch_stride + row * t.row_stride + head * t.head_stride;
    }

    void copy_row(const Element *src, Element *dst) const {
        std::memcpy(dst, src, sizeof(Element) * size_t(params_.d));
    }

    // Pairs (a, b) become (a cos - b sin, a sin + b cos). A position past the table is not rotated.
    void rotate(const Element *src, Element *dst, int64_t position) const {
        copy_row(src, dst);
        if (position >= cache_.rotary_seqlen) return;
        const int pairs = cache_.rotary_dim / 2;
        const auto *cos = static_cast<const Element *>(cache_.rotary_cos) + position * pairs;
        const auto *sin = static_cast<const Element *>(cache_.rotary_sin) + position * pairs;
        for (int i = 0; i < pairs; ++i) {
            const int first = cache_.is_rotary_interleaved ? 2 * i : i;
            const int second = cache_.is_rotary_interleaved ? 2 * i + 1 : i + pairs;
            const Acc a = Acc(src[first]), b = Acc(src[second]), c = Acc(cos[i]), s = Acc(sin[i]);
            dst[first] = Element(a * c - b * s);
            dst[second] = Element(a * s + b * c);
        }
    }

    const Flash_fwd_params &params_;
    const KvCache &cache_;
};

}  // namespace

void append_kv(const Flash_fwd_params &params) {
    switch (params.dtype) {
        case DType::float16:
            return Append<c10::Half>(params).run();
        case DType::bfloat16:
            return Append<c10::BFloat16>(params).run();
        case DType::float32:
            return Append<float>(params).run();
        case DType::float64:
            return Append<double>(params).run();
    }
}

}  // namespace flash::cpu
