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

struct Set {
    typedef __m512 Sum;
    typedef __m512i Pair, Both;
    typedef uint16_t Input;
    static const int LANES = 16, ROWS = 6, DECODED_BYTES = 4, CHUNK = 16, DIRECT_ROWS = 12;
    static constexpr int columns(int) { return 4; }
    static constexpr int code_columns(int) { return 4; }

    TARGET static INLINE Sum zero() { return _mm512_setzero_ps(); }
    TARGET static INLINE Sum load(const float* p) { return _mm512_loadu_ps(p); }
    TARGET static INLINE Sum broadcast(float x) { return _mm512_set1_ps(x); }
    TARGET static INLINE Sum multiply_add(Sum a, Sum b, Sum c) { return _mm512_fmadd_ps(a, b, c); }
    TARGET static INLINE Pair pair(const char* p) { return _mm512_loadu_si512(p); }
    TARGET static INLINE Pair decoded(const char* p) { return _mm512_load_si512(p); }
    TARGET static INLINE void keep(char* p, Pair w) { _mm512_store_si512(p, w); }
    TARGET static INLINE Pair decode(const char* p, int k) {
        return _mm512_permutexvar_epi16(_mm512_srli_epi16(_mm512_loadu_si512(p), 4 * k), _mm512_load_si512(CODES));
    }
    TARGET static INLINE Sum dot(Sum sum) { return sum; }
    TARGET static INLINE Both both(const Input* x) {
        int32_t bits;
        __builtin_memcpy(&bits, x, sizeof bits);
        return _mm512_set1_epi32(bits);
    }
    TARGET static INLINE Sum add_pair(Sum sum, Pair w, Both x) { return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x); }
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
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
    }
};

#include "matrix_tile.h"

}  // namespace

const Kernels kernels_v4_bf16 = kernels<Set>();

}  // namespace gnomon
#endif
