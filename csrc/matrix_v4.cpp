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

alignas(64) const float CODES[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

struct Set {
    typedef __m512 Sum;
    struct Pair { __m512 even, odd; };
    typedef const float* Both;
    typedef float Input;
    static const int LANES = 16, ROWS = 5, DECODED_BYTES = 8, CHUNK = 8, DIRECT_ROWS = 10;
    static constexpr int columns(int) { return 4; }
    static constexpr int code_columns(int) { return 4; }

    TARGET static INLINE Sum zero() { return _mm512_setzero_ps(); }
    TARGET static INLINE Sum load(const float* p) { return _mm512_loadu_ps(p); }
    TARGET static INLINE Sum broadcast(float x) { return _mm512_set1_ps(x); }
    TARGET static INLINE Sum multiply_add(Sum a, Sum b, Sum c) { return _mm512_fmadd_ps(a, b, c); }
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
        return {_mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * k), table), _mm512_permutexvar_ps(_mm512_srli_epi32(words, 16 + 4 * k), table)};
    }
    TARGET static INLINE Sum dot(Sum sum) { return sum; }
    TARGET static INLINE Both both(const Input* x) { return x; }
    TARGET static INLINE Sum add_pair(Sum sum, Pair w, Both x) {
        return _mm512_fmadd_ps(w.even, _mm512_set1_ps(x[0]), _mm512_fmadd_ps(w.odd, _mm512_set1_ps(x[1]), sum));
    }
    TARGET static INLINE Sum scale(const uint8_t* p) {
        const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        const __m512i bits = _mm512_max_epu32(_mm512_slli_epi32(e, 23), _mm512_set1_epi32(0x00400000));
        return _mm512_castsi512_ps(
            _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(e, _mm512_set1_epi32(255)), _mm512_set1_epi32(0x7fc00000)));
    }
    TARGET static INLINE void write(float* y, int64_t count, Sum sum, bool add) {
        const __mmask16 some = count >= 16 ? 0xffff : static_cast<__mmask16>((1u << count) - 1);
        if (add) sum = _mm512_add_ps(_mm512_maskz_loadu_ps(some, y), sum);
        _mm512_mask_storeu_ps(y, some, sum);
    }
    TARGET static INLINE void round(const float* x, Input* to) {
        const __m512i bits = _mm512_castps_si512(_mm512_loadu_ps(x)), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        const __mmask16 nan = _mm512_cmp_ps_mask(_mm512_castsi512_ps(bits), _mm512_castsi512_ps(bits), _CMP_UNORD_Q);
        const __m512i kept = _mm512_mask_or_epi32(nearest, nan, bits, _mm512_set1_epi32(0x00400000));
        _mm512_storeu_si512(to, _mm512_and_si512(kept, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
    }
};

#include "matrix_tile.h"

}  // namespace

const Kernels kernels_v4 = kernels<Set>();

}  // namespace gnomon
#endif
