// The states of rows after each split over keys (row_block.h) become one: the combine of split-KV.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "common/sink.h"
#include "row_block.h"

namespace flash::cpu {

// One row of d columns.
template <typename Acc>
struct PartialRow {
    Acc *o, *m, *l;

    explicit PartialRow(const PartialRows &rows)
        : o(static_cast<Acc *>(rows.o)), m(static_cast<Acc *>(rows.m)), l(static_cast<Acc *>(rows.l)) {}

    void clear(int d) const {
        std::fill_n(o, d, Acc(0));
        *m = -std::numeric_limits<Acc>::infinity();
        *l = 0;
    }

    // Adds the keys of `next`. scale: of m. The order of calls decides the last bits.
    void add(const PartialRow &next, int d, double scale) const {
        const Acc m_new = std::max(*m, *next.m), safe_m = std::isinf(m_new) && m_new < 0 ? Acc(0) : m_new;
        const Acc scale_log2 = Acc(scale * kLog2e);
        const Acc alpha = std::exp2((*m - safe_m) * scale_log2), beta = std::exp2((*next.m - safe_m) * scale_log2);
        *m = m_new;
        *l = alpha * *l + beta * *next.l;
        for (int c = 0; c < d; ++c) o[c] = alpha * o[c] + beta * next.o[c];
    }

    template <typename Element>
    void store(Element *out, Acc *lse, int d, double scale, Acc sink) const {
        *lse = *l == 0 ? -std::numeric_limits<Acc>::infinity() : *m * Acc(scale) + std::log(*l);
        const Acc factor = (*l == 0 ? Acc(0) : Acc(1) / *l) * join_sink(sink, *lse);
        for (int c = 0; c < d; ++c) out[c] = Element(o[c] * factor);
    }
};

}  // namespace flash::cpu
