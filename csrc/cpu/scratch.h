// Aligned scratch memory of one thread. group.h divides it into arrays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace flash::cpu {

constexpr size_t kScratchAlignment = 64;

struct FreeScratch {
    void operator()(void *p) const { ::operator delete(p, std::align_val_t{kScratchAlignment}); }
};
using ScratchMemory = std::unique_ptr<void, FreeScratch>;

inline ScratchMemory allocate_scratch(size_t bytes) {
    return ScratchMemory(::operator new(bytes, std::align_val_t{kScratchAlignment}));
}

}  // namespace flash::cpu
