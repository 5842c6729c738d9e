// The forward of one row block: the keys that each row sees, the loop over key blocks, the epilogue.
// flash_fwd_kernel_fma.h and flash_fwd_kernel_amx.h derive from it and supply the arithmetic: load_q, load_kv,
// step_vecs. row_block_decode.h derives from it for blocks of few rows and has a scale_rows of its own.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "common/row_mod.h"
#include "dropout.h"
#include "kernels.h"
#include "rows.h"
#include "score_mod.h"
#include "softmax.h"

namespace flash::cpu::FLASH_CPU_NAMESPACE {

// Self: the derived class. The products handle kPanel queries and at most kBlockN keys at a time.
template <typename Self, typename Element, int kPanel, int kBlockN>
class RowBlockForward {
protected:
    using Acc = typename AccOf<Element>::type;
    using Int = typename Simd<Acc>::Int;
    static constexpr bool kConvert = sizeof(Element) != sizeof(Acc);

public:
    void compute() {
        begin();
        for (int n_begin = n_min_; n_begin < n_max_; n_begin += kBlockN) visit(n_begin);
        end();
    }

    static ForwardKernel kernel(int max_panels) { return {kPanel, kPanel * max_panels, 0, &scratch_bytes, &run}; }

    static size_t scratch_bytes(const Flash_fwd_params &params, int64_t rows) {
        return Self(params, {0, 0, 0, rows}, nullptr).scratch_.bytes();
    }
    static void run(const Flash_fwd_params &params, const RowBlock &block, void *scratch) {
        for (int64_t head = 0; head < block.heads; ++head) {
            Self(params, block_of_head(params, block, head), static_cast<char *>(scratch)).compute();
        }
    }

protected:
    // kPanel of the block's rows, in the lanes of the vectors.
    struct Panel {
        int index;
        int64_t row;              // first row, counted from the block's first row
        int rows;                 // used lanes
        SoftmaxState<Acc> state;  // [kPanel] each
        KeysOfRows<Acc> keys;     // [kPanel]
        const Int *end_key;       // [kPanel]: the first `i` rows see no key from end_key[i - 1] on; rises with the row
    };

    RowBlockForward(const Flash_fwd_params &params, const RowBlock &block, char *scratch)
        : params_(params),
          block_(block),
          group_{params, block.bidb, block.bidh_k},
          d_(params.d),
          d_v_(params.d_v),
          panels_(round_up(block.rows, kPanel) / kPanel),
          score_mod_(params),
          dropout_(params),
          scale_(score_mod_.scale_left()),
          scale_log2_(Acc((score_mod_.is_on() ? 1 : params.softmax_scale) * kLog2e)),
          scratch_(scratch) {
        scratch_.take(m_, panels_ * kPanel);
        scratch_.take(l_, panels_ * kPanel);
        keys_.take(scratch_, params, panels_ * kPanel);
        end_key_ = keys_.hi;  // rises with the row
        if (params.key_ranges.is_used()) scratch_.take(end_key_, panels_ * kPanel);
        scratch_.take(panel_keys_, panels_);
        scratch_.take(common_keys_, panels_);
        score_mod_.take(scratch_, int64_t(panels_) * kPanel);
        dropout_.take(scratch_, kBlockN);
    }

    void begin() {
        set_keys();
        for (int index = 0; index < panels_; ++index) {
            self().load_q(panel(index));
            std::fill_n(panel(index).state.m, kPanel, -std::numeric_limits<Acc>::infinity());
            std::fill_n(panel(index).state.l, kPanel, Acc(0));
        }
    }

    void visit(int n_begin) {
        const int n_end = std::min(n_begin + kBlockN, n_max_);
        if (!is_seen(n_begin, n_end)) return;
        self().load_kv(n_begin, n_end);
        for (int index = 0; index < panels_; ++index) step(panel(index), n_begin, n_end);
    }

    void end() {
        for (int index = 0; index < panels_; ++index) {
            block_.partial.o == nullptr ? store_out(panel(index)) : store_partial(panel(index));
        }
    }

    Panel panel(int index) const {
        const int64_t row = int64_t(index) * kPanel;
        const int rows = int(std::min<int64_t>(block_.rows - row, kPanel));
        return {index, row, rows, {m_ + row, l_ + row}, keys_.from(row), end_key_ + row};
    }

    // First element of a row of q or o, or of a key of k or v. Rows are counted from the block's first row.
    Element *row_ptr(const TensorRef &t, int64_t row) const { return group_.row_ptr(t, block_.row_begin + row); }
    const Element *key_ptr(const TensorRef &t, int64_t key) const { return group_.key_ptr(t, key); }

    // Sets the keys of every row and panel, and [n_min, n_max) of the block. Lanes past the last row get the keys of
    // that row.
    void set_keys() {
        n_min_ = int(std::min<int64_t>(group_.seq.seqlen_k, block_.key_end));
        n_max_ = 0;
        RowKeys keys{};
        for (int64_t row = 0; row < int64_t(panels_) * kPanel; ++row) {
            const int64_t group_row = block_.row_begin + std::min(row, block_.rows - 1), in_panel = row % kPanel;
            if (row < block_.rows) {
                keys = group_.keys_seen(group_row);
                for (int64_t *key : {&keys.lo, &keys.hi, &keys.gap_lo, &keys.gap_hi})
                    *key = std::clamp(*key, block_.key_begin, block_.key_end);
                PanelKeys &of_panel = panel_keys_[row / kPanel];
                CommonKeys &common = common_keys_[row / kPanel];
                if (in_panel == 0) of_panel = {}, common = {};
                of_panel.add(keys);
                common.add(keys);
                if (!keys.is_empty()) {
                    n_min_ = std::min(n_min_, int(keys.lo));
                    n_max_ = std::max(n_max_, int(keys.hi));
                }
            }
            score_mod_.set_row(group_, group_row, row);
            keys_.set(row, keys);
            if (end_key_ != keys_.hi)
                end_key_[row] = std::max(Int(keys.hi), in_panel == 0 ? Int(0) : end_key_[row - 1]);
        }
        // Steps cut the keys at the same places for every row block of a split.
        n_min_ -= (n_min_ - int(block_.key_begin)) % kBlockN;
    }

    // True if a panel sees any of these keys.
    bool is_seen(int n_begin, int n_end) const {
        return std::any_of(panel_keys_, panel_keys_ + panels_,
                           [=](const PanelKeys &keys) { return keys.meets(n_begin, n_end); });
    }

    // One block of keys against one panel: product, softmax, product. Keys that no query of the panel sees are left
    // out. The step is masked if some query may not see all keys that are left. The derived class rounds the step to
    // multiples of kKeyStep keys, counted from n_begin.
    void step(const Panel &p, int n_begin, int n_end) {
        const PanelKeys &seen = panel_keys_[p.index];
        int n_first = seen.begin_in(n_begin);
        n_first -= (n_first - n_begin) % Self::kKeyStep;
        const int n_last = seen.end_in(n_end);
        if (n_first >= n_last) return;
        const bool masked = score_mod_.hides_keys() || !common_keys_[p.index].contain(n_first, n_last);
        prefetch_row_ = 2 * kBlockN * p.index / panels_;
        prefetch_end_ = 2 * kBlockN * (p.index + 1) / panels_;
        self().step_vecs(p, (p.rows + kLanes<Acc> - 1) / kLanes<Acc>, n_begin, n_first, n_last, masked);
    }

    // Applies the score modifiers to the step's scores. Returns true if the scores changed.
    bool make_logits(const Panel &p, Acc *s, int vecs, int n_first, int keys) const {
        if (!score_mod_.is_on()) return false;
        score_mod_.template apply<kPanel>(s, nullptr, n_first, keys, p.row, 0, vecs);
        return true;
    }

    // Prefetches K and V of the next key block while the caller multiplies. Each panel prefetches its share: a few rows
    // for every `tile` keys of the step.
    void prefetch_next_keys(int n_begin, int keys_done, int keys, int tile) {
        int count = (prefetch_end_ - prefetch_row_) * tile / (keys - keys_done) + 1;
        for (; count > 0 && prefetch_row_ < prefetch_end_; --count, ++prefetch_row_) {
            const int key = n_begin + kBlockN + prefetch_row_ / 2;
            if (key >= n_max_) return;
            const bool is_value = prefetch_row_ % 2 != 0;
            const auto *row = reinterpret_cast<const char *>(key_ptr(is_value ? params_.v : params_.k, key));
            const size_t bytes = sizeof(Element) * size_t(is_value ? d_v_ : d_);
            for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
        }
    }

    void store_out(const Panel &p) {
        Acc *rows[kPanel];
        for (int i = 0; i < p.rows; ++i) {
            Acc reference = p.state.m[i] * scale_, sum = p.state.l[i];
            const int64_t row = block_.row_begin + p.row + i;
            if (params_.max_logits != nullptr) add_max_logit(row, reference);
            const Acc weight = RowMod<Acc>::is_on(params_)
                                   ? RowMod<Acc>(params_, group_.bidb, group_.head(row)).join(reference, sum)
                                   : Acc(1);
            static_cast<Acc *>(params_.softmax_lse)[group_.lse_index(row)] =
                sum == 0 ? -std::numeric_limits<Acc>::infinity() : reference + std::log(sum);
            p.state.l[i] = sum == 0 ? Acc(0) : weight * Acc(dropout_.scale) / sum;
            if constexpr (kConvert)
                rows[i] = self().out_rows() + i * d_v_;
            else
                rows[i] = row_ptr(params_.o, p.row + i);
        }
        self().scale_rows(p, rows);
        if constexpr (kConvert) {
            for (int i = 0; i < p.rows; ++i) convert_row(rows[i], row_ptr(params_.o, p.row + i), d_v_);
        }
    }

    // logit: the largest of a row. Other threads may have rows of its head.
    void add_max_logit(int64_t row, Acc logit) const {
        Acc *to =
            static_cast<Acc *>(params_.max_logits) + group_.bidb * params_.max_logits_batch_stride + group_.head(row);
        Acc largest;
        __atomic_load(to, &largest, __ATOMIC_RELAXED);
        while (logit > largest &&
               !__atomic_compare_exchange(to, &largest, &logit, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        }
    }

    void store_partial(const Panel &p) {
        const int64_t first = p.row;
        Acc *rows[kPanel], *o = static_cast<Acc *>(block_.partial.o) + first * d_v_;
        std::copy_n(p.state.m, p.rows, static_cast<Acc *>(block_.partial.m) + first);
        std::copy_n(p.state.l, p.rows, static_cast<Acc *>(block_.partial.l) + first);
        for (int i = 0; i < p.rows; ++i) rows[i] = o + int64_t(i) * d_v_;
        std::fill_n(p.state.l, kPanel, Acc(1));
        self().scale_rows(p, rows);
    }

    // rows[i] = l[i] * row i of o.
    void scale_rows(const Panel &p, Acc *const *rows) const {
        panel_to_rows<Acc, kPanel>(self().out(p), p.state.l, p.rows, d_v_, rows);
    }

    Self &self() { return static_cast<Self &>(*this); }
    const Self &self() const { return static_cast<const Self &>(*this); }

    const Flash_fwd_params &params_;
    const RowBlock block_;
    const Group<Element> group_;
    const int d_, d_v_, panels_;
    int n_min_ = 0, n_max_ = 0;
    int prefetch_row_ = 0, prefetch_end_ = 0;  // of the next key block: row 2 i is row i of K, row 2 i + 1 of V
    ScoreMod<Acc> score_mod_;
    Dropout<kPanel> dropout_;
    const Acc scale_, scale_log2_;  // factors of the logits in the softmax; above 0
    Scratch scratch_;
    Acc *m_ = nullptr, *l_ = nullptr;    // [rows]
    KeysOfRows<Acc> keys_;               // [rows]
    Int *end_key_ = nullptr;             // [rows]
    PanelKeys *panel_keys_ = nullptr;    // [panels]
    CommonKeys *common_keys_ = nullptr;  // [panels]
};

}  // namespace flash::cpu::FLASH_CPU_NAMESPACE
