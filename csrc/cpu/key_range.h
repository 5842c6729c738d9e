// The keys that a query sees, and the queries that see given keys. The scheduling and the kernels share this file;
// nothing here depends on an instruction set.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../common/sequence.h"

namespace flash::cpu {

// The keys [lo, hi) that a query sees. lo and hi rise with the query.
struct KeyRange {
    int64_t lo, hi;

    KeyRange(const Flash_fwd_params &params, const Sequence &seq, int64_t query) {
        const int64_t diagonal = query + seq.seqlen_k - seq.seqlen_q, end = seq.seqlen_k;
        lo = params.window_size_left < 0 ? 0 : diagonal - params.window_size_left;
        hi = params.window_size_right < 0 ? end : diagonal + params.window_size_right + 1;
        lo = std::clamp<int64_t>(lo, 0, end);
        hi = std::clamp<int64_t>(hi, 0, end);
    }
    bool is_empty() const { return lo >= hi; }
    int64_t size() const { return hi - lo; }
};

// The queries [lo, hi) that see at least one of the keys [begin, end).
struct QueryRange {
    int64_t lo, hi;

    QueryRange(const Flash_fwd_params &params, const Sequence &seq, int64_t begin, int64_t end) {
        const int64_t shift = int64_t(seq.seqlen_q) - seq.seqlen_k, queries = begin < end ? seq.seqlen_q : 0;
        lo = params.window_size_right < 0 ? 0 : begin + shift - params.window_size_right;
        hi = params.window_size_left < 0 ? queries : end + shift + params.window_size_left;
        lo = std::clamp<int64_t>(lo, 0, queries);
        hi = std::clamp<int64_t>(hi, lo, queries);
    }
    int64_t size() const { return hi - lo; }
};

}  // namespace flash::cpu
