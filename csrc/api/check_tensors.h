// The checks that calls of every kind share: one tensor, one option, one relation each. checks.cpp and
// checks_kvcache.cpp put them together.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "api/options.h"

namespace flash {

struct Named {
    const char *name;
    const at::Tensor &tensor;
};
using NamedList = std::vector<Named>;

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxRows = kMaxInt / 4;  // rows of a tensor: keeps distances below kFar of common/block_info.h

void check_rank(const Named &x, int64_t rank, const char *shape);
void check_dtype(const Named &x, const std::string &backend);
void check_same_device(const Named &x, const at::Tensor &q);
// Dtype and device of q.
void check_same_kind(const Named &x, const at::Tensor &q);
void check_same_size(const Named &x, const Named &like, int64_t dim, const char *dim_name);
void check_same_shape(const Named &x, const Named &like);
// out or its gradient: the shape of q with the head dim of v.
void check_shape_of_out(const Named &x, const Named &q, const Named &v);
void check_at_most(const Named &x, int64_t dim, int64_t most, const char *dim_name);
void check_last_dim_contiguous(const Named &x);

// Head dims and heads of q, k and v. most: the largest head dim of q and k.
void check_heads(const Named &q, const Named &k, const Named &v, const std::string &backend, int64_t most);

// A tensor that a kernel writes, of a checked shape: the dtype and the device of q.
void check_written(const Named &x, const at::Tensor &q);
// What a call writes shares no memory with the other tensors that it reads or writes.
void check_no_overlap(const Named &written, const NamedList &others);
void add_given(NamedList &list, const char *name, const std::optional<at::Tensor> &given);

// A tensor of lengths or indices: int32, on the device of q.
void check_index(const Named &x, const at::Tensor &q);
// int32 [batch, max_blocks]. pages: k or k_cache.
void check_block_table(const Named &table, const Named &pages, const at::Tensor &q, int64_t batch);

// True if values of x may be read on the host: CPU tensors, or FLASH_ATTN_MINI_CHECK=1 (synchronises).
bool may_read(const at::Tensor &x);

// The options of a call with `batch` sequences.
void check_options(const Options &options, const at::Tensor &q, int64_t batch);

// The page numbers that a block table may hold, for a message.
std::string pages_text(int64_t num_pages);

}  // namespace flash
