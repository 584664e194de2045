/* Packed products with AVX-512 but without its bf16 instructions: products of bf16 values are exact in fp32, so two multiply-adds in the
 * same order give what the one instruction does. */
#include "lanes.h"
#include "matrix_kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized" /* gcc 12 says so of its own undefined vectors */

#define TARGET __attribute__((target("arch=x86-64-v4")))

namespace gnomon {

namespace {

alignas(64) const float CODES[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

#include "matrix_v4.h"

struct Set : Wide {
    struct Pair { __m512 even, odd; };
    typedef const float* Both;
    typedef float Input;
    static const int ROWS = 5, DECODED_BYTES = 8, CHUNK = 8, DIRECT_ROWS = 10;

    TARGET static INLINE Pair pair(const char* p) {
        const __m512i bits = _mm512_loadu_si512(p);
        return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)),
                _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
    }
    TARGET static INLINE Pair decoded(const char* p) {
        return {_mm512_load_ps(p), _mm512_load_ps(p + 64)};
    }
    TARGET static INLINE void keep(char* p, Pair w) {
        _mm512_store_ps(p, w.even);
        _mm512_store_ps(p + 64, w.odd);
    }
    TARGET static INLINE Pair decode(const char* p, int k) {
        const __m512i words = _mm512_loadu_si512(p);
        const __m512 table = _mm512_load_ps(CODES); /* an index is its low four bits */
        return {_mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * k), table),
                _mm512_permutexvar_ps(_mm512_srli_epi32(words, 16 + 4 * k), table)};
    }
    TARGET static INLINE Both both(const Input* x) { return x; }
    TARGET static INLINE Sum add_pair(Sum sum, Pair w, Both x) {
        return _mm512_fmadd_ps(w.even, _mm512_set1_ps(x[0]), _mm512_fmadd_ps(w.odd, _mm512_set1_ps(x[1]), sum));
    }
    TARGET static INLINE void round(const float* x, Input* to) {
        _mm512_storeu_si512(to, _mm512_and_si512(nearest(x), _mm512_set1_epi32(static_cast<int>(0xffff0000))));
    }
};

#include "matrix_tile.h"

}  // namespace

const Kernels kernels_v4 = kernels<Set>();

}  // namespace gnomon
#endif
