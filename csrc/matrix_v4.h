/* What the two sets of AVX-512 instructions share: sixteen lanes of fp32, their scales, and rounding to bf16. A source file defines TARGET
 * and includes this inside an anonymous namespace, as it does matrix_tile.h; its Set adds how pairs of bf16 are held and multiplied. */

struct Wide {
    typedef __m512 Sum;
    static const int LANES = 16;
    static const bool BY_WORDS = false;
    static constexpr int columns(int) { return 4; }
    static constexpr int code_columns(int) { return 4; }

    TARGET static INLINE Sum zero() { return _mm512_setzero_ps(); }
    TARGET static INLINE Sum load(const float* p) { return _mm512_loadu_ps(p); }
    TARGET static INLINE Sum broadcast(float x) { return _mm512_set1_ps(x); }
    TARGET static INLINE Sum multiply_add(Sum a, Sum b, Sum c) { return _mm512_fmadd_ps(a, b, c); }
    TARGET static INLINE Sum dot(Sum sum) { return sum; }
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
    /* Sixteen values to the nearest bf16, to even between two; a bf16 is the upper half of each lane, the lower half is not cleared. */
    TARGET static INLINE __m512i nearest(const float* x) {
        const __m512i bits = _mm512_castps_si512(_mm512_loadu_ps(x));
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        const __mmask16 nan = _mm512_cmp_ps_mask(_mm512_castsi512_ps(bits), _mm512_castsi512_ps(bits), _CMP_UNORD_Q);
        return _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x00400000));
    }
};
