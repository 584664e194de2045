/* Aligned memory for scratch. Operators have no way to report that there is none, and most ask for it on threads of their own, so the
 * process ends there: with a line that says how much was asked for, not somewhere later with a bad address. */
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace gnomon {

const int64_t ALIGNMENT = 64; /* bytes: a vector of any instruction set */

/* At least `bytes` bytes, to be freed with std::free. */
inline void* allocate(int64_t bytes) {
    const int64_t size = bytes < ALIGNMENT ? ALIGNMENT : (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    void* memory = bytes < 0 ? nullptr : std::aligned_alloc(ALIGNMENT, static_cast<size_t>(size));
    if (memory) return memory;
    std::fprintf(stderr, "gnomon: out of memory: an operator asked for %lld bytes of scratch\n", static_cast<long long>(bytes));
    std::abort();
}

}  // namespace gnomon
