/* Packed products with AVX512-BF16: one instruction multiplies and adds two bf16 pairs per lane, the odd one first. */
#include "lanes.h"
#include "matrix_kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized" /* gcc 12 says so of its own undefined vectors */

#define TARGET __attribute__((target("arch=x86-64-v4,avx512bf16")))

namespace gnomon {

namespace {

/* E2M1 as bf16, twice: only the low four bits of an index matter. */
alignas(64) const uint16_t CODES[32] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80,
                                        0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0, 0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
                                        0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

#include "matrix_v4.h"

struct Set : Wide {
    typedef __m512i Pair, Both;
    typedef uint16_t Input;
    static const int ROWS = 6, DECODED_BYTES = 4, CHUNK = 16, DIRECT_ROWS = 12;

    TARGET static INLINE Pair pair(const char* p) { return _mm512_loadu_si512(p); }
    TARGET static INLINE Pair decoded(const char* p) { return _mm512_load_si512(p); }
    TARGET static INLINE void keep(char* p, Pair w) { _mm512_store_si512(p, w); }
    TARGET static INLINE Pair decode(const char* p, int k) {
        return _mm512_permutexvar_epi16(_mm512_srli_epi16(_mm512_loadu_si512(p), 4 * k), _mm512_load_si512(CODES));
    }
    TARGET static INLINE Both both(const Input* x) {
        int32_t bits;
        __builtin_memcpy(&bits, x, sizeof bits);
        return _mm512_set1_epi32(bits);
    }
    TARGET static INLINE Sum add_pair(Sum sum, Pair w, Both x) { return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x); }
    TARGET static INLINE void round(const float* x, Input* to) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(nearest(x), 16)));
    }
};

#include "matrix_tile.h"

}  // namespace

const Kernels kernels_v4_bf16 = kernels<Set>();

}  // namespace gnomon
#endif
