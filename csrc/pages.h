/* Huge pages for large arrays that are about to be written for the first time: a fault per 4 KiB costs more than many kernels. */
#pragma once

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

const int64_t LARGE_ARRAY = int64_t{8} << 20;

/* Asks for huge pages where the system has them; what is in memory already stays as it is. */
inline void prefer_huge_pages(void* data, int64_t bytes) {
#ifdef __linux__
    const uintptr_t page = 4096, begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
    if (data && bytes >= LARGE_ARRAY && begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}
