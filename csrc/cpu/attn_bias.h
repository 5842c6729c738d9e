// attn_bias of a panel of rows: what is added to their scores, and the keys that it hides. Layout as in softmax.h:
// [key][row], each lane a row. A hidden key gets a score of -inf, whatever its score was.
#pragma once

#include "rows.h"
#include "simd.h"

namespace flash::cpu::FLASH_CPU_NAMESPACE {

struct Flag {  // of type boolean: 1 where the row sees the key
    uint8_t byte;
};

// What is added to the scores of consecutive keys: 0, or -inf for a hidden one.
template <typename T>
FLASH_INLINE Vec<T> bias_of(const T *src) {
    return load_elements(src);
}
template <typename T>
FLASH_INLINE Vec<T> bias_of(const Half *src) {
    return load_elements(src);
}
template <typename T>
FLASH_INLINE Vec<T> bias_of(const BFloat16 *src) {
    return load_elements(src);
}
template <typename T>
FLASH_INLINE Vec<T> bias_of(const Flag *src) {
    typedef uint8_t Bytes __attribute__((vector_size(kLanes<T>)));
    Bytes bytes;
    std::memcpy(&bytes, src, sizeof(bytes));
    const IntVec<T> flags = __builtin_convertvector(bytes, IntVec<T>);
    return flags != IntVec<T>{} ? Vec<T>{} : broadcast<T>(-std::numeric_limits<T>::infinity());
}

// The same for `count` keys, at most a vector of them.
template <typename T, typename Value>
FLASH_INLINE Vec<T> bias_of_keys(const Value *src, int64_t key_stride, int count) {
    if (key_stride == 1 && count == kLanes<T>) return bias_of<T>(src);
    Value some[kLanes<T>] = {};
    for (int i = 0; i < count; ++i) some[i] = src[i * key_stride];
    return bias_of<T>(some);
}

// s = s * scale + bias, and -inf where the bias is.
template <typename T>
FLASH_INLINE void add_bias(T *s, Vec<T> scale, Vec<T> bias) {
    const Vec<T> minus_inf = broadcast<T>(-std::numeric_limits<T>::infinity());
    store<T>(s, bias == minus_inf ? minus_inf : fma<T>(load<T>(s), scale, bias));
}

// rows[i]: the bias of the row in lane i and the first of the keys.
template <typename T, int kStride, typename Value>
FLASH_NOINLINE void add_bias_of_rows(T *s, int keys, T scale, const void *const *rows, int64_t first_key,
                                     int64_t key_stride, int vecs) {
    const Vec<T> scale_vec = broadcast<T>(scale);
    for (int j = 0; j < vecs; ++j) {
        const void *const *rows_j = rows + j * kLanes<T>;
        for (int n = 0; n < keys; n += kLanes<T>) {
            const int count = std::min(kLanes<T>, keys - n);
            Vec<T> bias[kLanes<T>];
            for (int i = 0; i < kLanes<T>; ++i) {
                const auto *row = static_cast<const Value *>(rows_j[i]) + (first_key + n) * key_stride;
                bias[i] = bias_of_keys<T>(row, key_stride, count);
            }
            transpose_square<T>(bias);
            for (int i = 0; i < count; ++i) add_bias<T>(s + (n + i) * kStride + j * kLanes<T>, scale_vec, bias[i]);
        }
    }
}

// The same where all rows have one bias.
template <typename T, int kStride, typename Value>
FLASH_NOINLINE void add_same_bias(T *s, int keys, T scale, const void *row, int64_t first_key, int64_t key_stride,
                                  int vecs) {
    const Vec<T> scale_vec = broadcast<T>(scale);
    for (int n = 0; n < keys; n += kLanes<T>) {
        const int count = std::min(kLanes<T>, keys - n);
        const auto *first = static_cast<const Value *>(row) + (first_key + n) * key_stride;
        const Vec<T> bias = bias_of_keys<T>(first, key_stride, count);
        for (int i = 0; i < count; ++i) {
            const Vec<T> bias_i = broadcast<T>(bias[i]);
            for (int j = 0; j < vecs; ++j) add_bias<T>(s + (n + i) * kStride + j * kLanes<T>, scale_vec, bias_i);
        }
    }
}

template <typename T>
class BiasRows {
public:
    explicit BiasRows(const Flash_fwd_params &params)
        : is_used(params.attn_bias.is_used()),
          bias_(params.attn_bias),
          is_same_(bias_.row_stride == 0 && (bias_.head_stride == 0 || params.h_h_k_ratio == 1)),
          seqlen_k_(params.seqlen_k),
          dtype_(bias_.type == AttnBias::Type::float32 ? DType::float32 : params.dtype) {}

    void take(Scratch &scratch, int64_t rows) { scratch.take(rows_, is_used ? rows : 0); }

    // Lane `i` holds row `row` of the group.
    template <typename Element>
    void set_row(const Group<Element> &group, int64_t row, int64_t i) {
        if (!is_used) return;
        const int64_t at =
            group.bidb * bias_.batch_stride + group.head(row) * bias_.head_stride + group.query(row) * bias_.row_stride;
        rows_[i] = static_cast<const char *>(bias_.ptr) + at * bytes();
    }

    // s = s * scale + bias for the keys [n_begin, n_begin + keys) that exist, in `vecs` vectors from `lane` on; `first`
    // is the row of lane 0.
    template <int kStride>
    void add(T *s, int n_begin, int keys, T scale, int64_t first, int lane, int vecs) const {
        visit([&](auto value) {
            using Value = decltype(value);
            const int count = std::min(keys, seqlen_k_ - n_begin);
            const void *const *rows = rows_ + first + lane;
            if (is_same_)
                add_same_bias<T, kStride, Value>(s + lane, count, scale, rows[0], n_begin, bias_.key_stride, vecs);
            else
                add_bias_of_rows<T, kStride, Value>(s + lane, count, scale, rows, n_begin, bias_.key_stride, vecs);
        });
    }

    // True if no row of the group sees the key by attn_bias.
    template <typename Element>
    bool hides_from_all(const Group<Element> &group, int64_t key) const {
        bool hides = true;
        visit([&](auto value) {
            using Value = decltype(value);
            const int64_t step = is_same_ ? group.rows() : 1;
            for (int64_t row = 0; row < group.rows() && hides; row += step) {
                const int64_t at = group.bidb * bias_.batch_stride + group.head(row) * bias_.head_stride +
                                   group.query(row) * bias_.row_stride + key * bias_.key_stride;
                const Vec<T> bias = bias_of_keys<T>(static_cast<const Value *>(bias_.ptr) + at, 0, 1);
                hides = bias[0] == -std::numeric_limits<T>::infinity();
            }
        });
        return hides;
    }

    const bool is_used;

private:
    // Calls function(a value of the type in memory).
    template <typename Function>
    void visit(const Function &function) const {
        if (bias_.type == AttnBias::Type::boolean) {
            function(Flag());
        } else if constexpr (std::is_same_v<T, double>) {
            function(double());
        } else {
            switch (dtype_) {
                case DType::float16:
                    return function(Half());
                case DType::bfloat16:
                    return function(BFloat16());
                default:
                    return function(float());
            }
        }
    }
    int64_t bytes() const {
        return bias_.type == AttnBias::Type::boolean                   ? 1
               : dtype_ == DType::float16 || dtype_ == DType::bfloat16 ? 2
                                                                       : int64_t(sizeof(T));
    }

    const AttnBias bias_;
    const bool is_same_;  // all rows of a group have one bias
    const int seqlen_k_;
    const DType dtype_;  // in memory, where it is not boolean
    const void **rows_ = nullptr;
};

// x = 0 where s is -inf: what a hidden key gives, even if it has an infinity or a NaN.
template <typename T, int kStride>
FLASH_NOINLINE void clear_hidden(const T *s, T *x, int keys, int lane, int vecs) {
    const Vec<T> minus_inf = broadcast<T>(-std::numeric_limits<T>::infinity());
    for (int n = 0; n < keys; ++n) {
        for (int j = 0; j < vecs; ++j) {
            const int at = n * kStride + lane + j * kLanes<T>;
            store<T>(x + at, load<T>(s + at) == minus_inf ? Vec<T>{} : load<T>(x + at));
        }
    }
}

// True if one of the numbers is infinite or NaN.
template <typename T>
bool has_special(const T *x, int n) {
    T check = 0;
    for (int i = 0; i < n; ++i) check += x[i] * T(0);
    return check != 0;
}
inline bool has_special(const BFloat16 *x, int n) {
    bool is_special = false;
    for (int i = 0; i < n; ++i) is_special |= (x[i].bits & 0x7f80) == 0x7f80;
    return is_special;
}

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
