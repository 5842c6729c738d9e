// The checks of checks.h: tensors, sequences and options of a forward or backward.
#include "api/checks.h"

#include <vector>

#include "api/attn_bias.h"
#include "api/check_tensors.h"
#include "api/key_ranges.h"
#include "common/message.h"
#include "flash.h"

namespace flash {
namespace {

void check_shapes(const FwdArgs &args, const std::string &backend) {
    const Named q{"q", args.q}, k{"k", args.k}, v{"v", args.v};
    const bool is_dense = !args.is_varlen(), is_paged = args.is_paged();
    check_rank(q, is_dense ? 4 : 3, is_dense ? "[batch, seqlen_q, nheads, headdim]" : "[total_q, nheads, headdim]");
    for (const Named &x : {k, v}) {
        check_rank(x, is_dense || is_paged ? 4 : 3,
                   is_dense   ? "[batch, seqlen_k, nheads_k, headdim]"
                   : is_paged ? "[num_pages, page_size, nheads_k, headdim]"
                              : "[total_k, nheads_k, headdim]");
    }
    const char *rows_of_k = is_dense ? "seqlen" : is_paged ? "page_size" : "total_k";
    if (is_dense) {
        check_same_size(k, q, 0, "batch");
        check_same_size(v, q, 0, "batch");
        check_at_most(q, 0, kMaxInt, "batch");
    } else if (is_paged) {
        check_same_size(v, k, 0, "num_pages");
    }
    check_same_size(v, k, -3, rows_of_k);
    check_at_most(q, -3, kMaxRows, is_dense ? "seqlen" : "total_q");
    check_at_most(k, -3, kMaxRows, rows_of_k);
    check_heads(q, k, v, backend, kMaxHeadDim);
}

// softmax_lse or its gradient.
void check_lse(const Named &x, const FwdArgs &args) {
    const at::Tensor &q = args.q;
    FLASH_CHECK_TYPE(x.tensor.scalar_type() == lse_dtype(q), x.name, " has dtype ", x.tensor.scalar_type(),
                     "; allowed: ", lse_dtype(q), " for inputs of ", q.scalar_type());
    check_same_device(x, q);
    const bool is_varlen = args.is_varlen();
    const std::vector<int64_t> shape =
        is_varlen ? std::vector<int64_t>{q.size(1), q.size(0)} : std::vector<int64_t>{q.size(0), q.size(2), q.size(1)};
    FLASH_CHECK_VALUE(x.tensor.sizes() == shape, x.name, " has shape ", x.tensor.sizes(),
                      "; allowed: ", is_varlen ? "[nheads, total_q]" : "[batch, nheads, seqlen_q]", " = ",
                      list_of(shape));
}

void check_cu_seqlens_shape(const Named &x, const at::Tensor &q) {
    check_index(x, q);
    FLASH_CHECK_VALUE(x.tensor.dim() == 1 && x.tensor.size(0) >= 1, x.name, " has shape ", x.tensor.sizes(),
                      "; allowed: [batch + 1], one dimension of at least 1");
    FLASH_CHECK_VALUE(x.tensor.is_contiguous(), x.name, " has strides ", x.tensor.strides(), "; allowed: contiguous");
}

// cu_seqlens of `side` (q or k) starts at 0, never falls, ends at `rows` (-1: anywhere), and no sequence is longer than
// max_seqlen.
void check_cu_seqlens_values(const char *side, const at::Tensor &cu_seqlens, int64_t rows, int64_t max_seqlen) {
    const at::Tensor on_cpu = cu_seqlens.cpu();
    const int *values = on_cpu.data_ptr<int>();
    const int64_t batch = on_cpu.size(0) - 1;
    FLASH_CHECK_VALUE(values[0] == 0, "cu_seqlens_", side, " starts at ", values[0], "; allowed: 0");
    for (int64_t i = 0; i < batch; ++i) {
        FLASH_CHECK_VALUE(values[i + 1] >= values[i], "cu_seqlens_", side, " falls from ", values[i], " to ",
                          values[i + 1], " at index ", i + 1, "; allowed: values that never fall");
        FLASH_CHECK_VALUE(values[i + 1] - values[i] <= max_seqlen, "max_seqlen_", side, " is ", max_seqlen,
                          "; allowed: at least the length of every sequence; sequence ", i, " has length ",
                          values[i + 1] - values[i]);
    }
    FLASH_CHECK_VALUE(rows < 0 || values[batch] == rows, "cu_seqlens_", side, " ends at ", values[batch],
                      "; allowed: the rows of ", side, ", ", rows);
}

// Every page that holds a key of a sequence is in the pool.
void check_block_table_values(const FwdArgs &args) {
    const at::Tensor on_cpu = args.sequences.block_table->cpu(), lengths = args.sequences.cu_seqlens_k->diff().cpu();
    const int64_t num_pages = args.k.size(0), page_size = args.k.size(1), columns = on_cpu.size(1);
    const auto table = on_cpu.accessor<int, 2>();
    const auto length = lengths.accessor<int, 1>();
    for (int64_t bidb = 0; bidb < on_cpu.size(0); ++bidb) {
        FLASH_CHECK_VALUE(length[bidb] <= columns * page_size, "block_table has ", columns, " pages of ", page_size,
                          " keys for each sequence; allowed: enough for every sequence, sequence ", bidb, " has ",
                          length[bidb], " keys");
        for (int64_t page = 0; page * page_size < length[bidb]; ++page) {
            const int index = table[bidb][page];
            FLASH_CHECK_VALUE(index >= 0 && index < num_pages, "block_table has page ", index, " at [", bidb, ", ",
                              page, "]; allowed: ", pages_text(num_pages));
        }
    }
}

void check_varlen(const FwdArgs &args) {
    const Sequences &varlen = args.sequences;
    FLASH_CHECK_VALUE(varlen.cu_seqlens_k.has_value(),
                      "cu_seqlens_k is None and cu_seqlens_q is given; allowed: both or neither");
    const Named cu_q{"cu_seqlens_q", *varlen.cu_seqlens_q}, cu_k{"cu_seqlens_k", *varlen.cu_seqlens_k};
    check_cu_seqlens_shape(cu_q, args.q);
    check_cu_seqlens_shape(cu_k, args.q);
    check_same_shape(cu_k, cu_q);
    const auto check_max_seqlen = [](const char *name, int64_t value) {
        FLASH_CHECK_VALUE(value >= 0 && value <= kMaxInt, name, " is ", value, "; allowed: 0 to ", kMaxInt);
    };
    check_max_seqlen("max_seqlen_q", varlen.max_seqlen_q);
    check_max_seqlen("max_seqlen_k", varlen.max_seqlen_k);
    if (args.is_paged()) {
        check_block_table({"block_table", *varlen.block_table}, {"k", args.k}, args.q, args.batch());
    }
    if (may_read(args.q)) {
        check_cu_seqlens_values("q", *varlen.cu_seqlens_q, args.q.size(0), varlen.max_seqlen_q);
        check_cu_seqlens_values("k", *varlen.cu_seqlens_k, args.is_paged() ? -1 : args.k.size(0), varlen.max_seqlen_k);
        if (args.is_paged()) {
            check_block_table_values(args);
        }
    }
}

// q, k, v and the sequences.
void check_inputs(const FwdArgs &args, const std::string &backend) {
    check_dtype({"q", args.q}, backend);
    check_same_kind({"k", args.k}, args.q);
    check_same_kind({"v", args.v}, args.q);
    check_shapes(args, backend);
    for (const Named &x : {Named{"q", args.q}, Named{"k", args.k}, Named{"v", args.v}}) {
        check_last_dim_contiguous(x);
    }
    if (args.is_varlen()) {
        check_varlen(args);
    } else {
        FLASH_CHECK_VALUE(!args.sequences.block_table.has_value() && !args.sequences.cu_seqlens_k.has_value(),
                          "cu_seqlens_q is None and cu_seqlens_k or block_table is given; allowed: all or none");
    }
}

// What a forward reads.
NamedList inputs_of(const FwdArgs &args) {
    NamedList list{{"q", args.q}, {"k", args.k}, {"v", args.v}};
    for_each_tensor(args.sequences, [&](const char *name, const Optional &x) { add_given(list, name, x); });
    for_each_tensor(args.options, [&](const char *name, const Optional &x) { add_given(list, name, x); });
    return list;
}

void check_given_gradients(const BwdArgs &args) {
    const FwdArgs &forward = args.forward;
    NamedList others = inputs_of(forward);
    others.push_back({"out", *forward.out});
    others.push_back({"dout", args.dout});
    others.push_back({"softmax_lse", args.softmax_lse});
    add_given(others, "dsoftmax_lse", args.dsoftmax_lse);
    if (forward.options.dropout_p > 0.0) {
        add_given(others, "rng_state", args.rng_state);
    }
    const auto check_gradient = [&](const char *name, const std::optional<at::Tensor> &given, const Named &like) {
        if (given.has_value()) {
            check_same_shape({name, *given}, like);
            check_written({name, *given}, forward.q);
            check_no_overlap({name, *given}, others);
            others.push_back({name, *given});
        }
    };
    check_gradient("dq", args.dq, {"q", forward.q});
    check_gradient("dk", args.dk, {"k", forward.k});
    check_gradient("dv", args.dv, {"v", forward.v});
}

}  // namespace

void check_rng_state(const std::optional<at::Tensor> &rng_state, double dropout_p, const at::Tensor &q) {
    if (dropout_p == 0.0) {
        return;
    }
    FLASH_CHECK_VALUE(rng_state.has_value(), "rng_state is None and dropout_p ", dropout_p,
                      "; allowed with dropout: the rng_state that the forward returned");
    FLASH_CHECK_TYPE(rng_state->scalar_type() == at::kLong, "rng_state has dtype ", rng_state->scalar_type(),
                     "; allowed: int64");
    FLASH_CHECK_VALUE(rng_state->dim() == 1 && rng_state->size(0) == 2, "rng_state has shape ", rng_state->sizes(),
                      "; allowed with dropout: [2], as the forward returned it");
    check_same_device({"rng_state", *rng_state}, q);
}

void check_fwd(const FwdArgs &args, const std::string &backend) {
    check_inputs(args, backend);
    check_options(args.options, args.q, args.batch());
    check_key_ranges(args);
    check_attn_bias(args);
    if (args.out.has_value()) {
        check_shape_of_out({"out", *args.out}, {"q", args.q}, {"v", args.v});
        check_written({"out", *args.out}, args.q);
        check_no_overlap({"out", *args.out}, inputs_of(args));
    }
}

void check_bwd(const BwdArgs &args, const std::string &backend) {
    const FwdArgs &forward = args.forward;
    const at::Tensor &q = forward.q, &out = *forward.out;
    check_inputs(forward, backend);
    for (const Named &x : {Named{"dout", args.dout}, Named{"out", out}}) {
        check_same_kind(x, q);
        check_shape_of_out(x, {"q", q}, {"v", forward.v});
    }
    check_lse({"softmax_lse", args.softmax_lse}, forward);
    if (args.dsoftmax_lse.has_value()) {
        check_lse({"dsoftmax_lse", *args.dsoftmax_lse}, forward);
    }
    check_options(forward.options, q, forward.batch());
    check_key_ranges(forward);
    check_attn_bias(forward);
    check_rng_state(args.rng_state, forward.options.dropout_p, q);
    if (args.dq.has_value() || args.dk.has_value() || args.dv.has_value()) {
        check_given_gradients(args);
    }
}

}  // namespace flash
