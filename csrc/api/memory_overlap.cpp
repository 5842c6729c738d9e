// The functions of memory_overlap.h. A tensor is a set of bytes: its first address plus a sum of index * stride over
// its dimensions, the last of which are the bytes of an element. Two tensors overlap if a difference of two such sums
// is the distance of their first addresses.
#include "api/memory_overlap.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace flash {
namespace {

struct Dim {
    int64_t stride, size;  // in bytes
};

// factor * stride, with a factor from least to most.
struct Term {
    int64_t stride, least, most;
};

int64_t extent(const at::Tensor &x) {
    if (x.numel() == 0) {
        return 0;
    }
    int64_t elements = 1;
    for (int64_t dim = 0; dim < x.dim(); ++dim) {
        elements += (x.size(dim) - 1) * x.stride(dim);
    }
    return elements * int64_t(x.element_size());
}

const char *begin_of(const at::Tensor &x) {
    return static_cast<const char *>(x.const_data_ptr());
}

// The dimensions of x with the smallest stride first. Dimensions that together are one run of memory are one. Those of
// size 1 and of stride 0 add no address.
std::vector<Dim> dims_of(const at::Tensor &x) {
    const auto bytes = int64_t(x.element_size());
    std::vector<Dim> dims{{1, bytes}};
    for (int64_t dim = 0; dim < x.dim(); ++dim) {
        if (x.size(dim) > 1 && x.stride(dim) != 0) {
            dims.push_back({x.stride(dim) * bytes, x.size(dim)});
        }
    }
    std::sort(dims.begin(), dims.end(), [](const Dim &a, const Dim &b) { return a.stride < b.stride; });
    size_t last = 0;
    for (size_t i = 1; i < dims.size(); ++i) {
        if (dims[i].stride == dims[last].stride * dims[last].size) {
            dims[last].size *= dims[i].size;
        } else {
            dims[++last] = dims[i];
        }
    }
    dims.resize(last + 1);
    return dims;
}

// True if every stride is at least the extent of the smaller ones: then no two elements share memory.
bool is_nested(const std::vector<Dim> &dims) {
    int64_t reach = 1;
    for (const Dim &dim : dims) {
        if (dim.stride < reach) {
            return false;
        }
        reach += (dim.size - 1) * dim.stride;
    }
    return true;
}

// Whether a sum of the terms can be `sum`. The search ends with "no" after kMaxSteps: nested strides take two steps for
// each term, and only contrived ones take many more.
class Search {
public:
    explicit Search(std::vector<Term> terms) : terms_(std::move(terms)) {
        std::sort(terms_.begin(), terms_.end(), [](const Term &a, const Term &b) { return a.stride > b.stride; });
    }

    bool reaches(int64_t sum) {
        steps_ = 0;
        return reaches(sum, 0);
    }

private:
    static constexpr int kMaxSteps = 10000;

    static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

    bool reaches(int64_t sum, size_t i) {
        if (i == terms_.size()) {
            return sum == 0;
        }
        const Term &term = terms_[i];
        int64_t least_rest = 0, most_rest = 0;  // what the smaller terms can add
        for (size_t j = i + 1; j < terms_.size(); ++j) {
            least_rest += terms_[j].least * terms_[j].stride;
            most_rest += terms_[j].most * terms_[j].stride;
        }
        const int64_t first = std::max(term.least, -floor_div(most_rest - sum, term.stride));
        const int64_t last = std::min(term.most, floor_div(sum - least_rest, term.stride));
        for (int64_t factor = first; factor <= last && ++steps_ <= kMaxSteps; ++factor) {
            if (reaches(sum - factor * term.stride, i + 1)) {
                return true;
            }
        }
        return false;
    }

    std::vector<Term> terms_;
    int steps_ = 0;
};

}  // namespace

bool has_internal_overlap(const at::Tensor &x) {
    if (x.numel() < 2 || x.is_non_overlapping_and_dense()) {
        return false;
    }
    for (int64_t dim = 0; dim < x.dim(); ++dim) {
        if (x.size(dim) > 1 && x.stride(dim) == 0) {
            return true;
        }
    }
    const std::vector<Dim> dims = dims_of(x);
    if (is_nested(dims)) {
        return false;
    }
    // Two elements share memory if differences of their indices, not all 0, add up to 0. The largest stride of those
    // that differ has a positive difference.
    std::vector<Term> terms;
    for (const Dim &dim : dims) {
        terms.push_back({dim.stride, 1, dim.size - 1});
        if (Search(terms).reaches(0)) {
            return true;
        }
        terms.back().least = 1 - dim.size;
    }
    return false;
}

bool have_overlap(const at::Tensor &a, const at::Tensor &b) {
    const char *const begin_a = begin_of(a), *const begin_b = begin_of(b);
    const std::less<> before;
    if (!before(begin_a, begin_b + extent(b)) || !before(begin_b, begin_a + extent(a))) {
        return false;
    }
    std::vector<Term> terms;
    for (const Dim &dim : dims_of(a)) {
        terms.push_back({dim.stride, 0, dim.size - 1});
    }
    for (const Dim &dim : dims_of(b)) {
        const auto same =
            std::find_if(terms.begin(), terms.end(), [&](const Term &x) { return x.stride == dim.stride; });
        if (same == terms.end()) {
            terms.push_back({dim.stride, 1 - dim.size, 0});
        } else {
            same->least += 1 - dim.size;
        }
    }
    return Search(std::move(terms)).reaches(begin_b - begin_a);
}

}  // namespace flash
