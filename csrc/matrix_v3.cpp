/* Packed products with AVX2 and FMA: half the lanes and half the registers of csrc/matrix_v4.cpp, the same sums. */
#include "lanes.h"
#include "matrix_kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define TARGET __attribute__((target("arch=x86-64-v3")))

namespace gnomon {

namespace {

/* What decoding reads: twice the value of each code (for both halves of a vector), the low four bits of each byte, shuffles that move
 * byte 1 or byte 2 of each word to its top with zeros below, and the top byte of each word. */
enum Constant { TWICE, CODE, MOVE_1, MOVE_2, TOP, CONSTANTS };
#define MOVE(b) -1, -1, -1, b, -1, -1, -1, 4 + b, -1, -1, -1, 8 + b, -1, -1, -1, 12 + b
#define VALUES 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12
#define WORDS(a, b) a, a, a, b, a, a, a, b, a, a, a, b, a, a, a, b
alignas(32) const int8_t TABLES[CONSTANTS][32] = {{VALUES, VALUES}, {WORDS(15, 15), WORDS(15, 15)}, {MOVE(1), MOVE(1)}, {MOVE(2), MOVE(2)},
                                                  {WORDS(0, -1), WORDS(0, -1)}};
typedef const int8_t (*Tables)[32];

struct Set {
    typedef __m256 Sum;
    struct Pair { __m256 even, odd; };
    typedef const float* Both;
    typedef float Input;
    static const int LANES = 8, ROWS = 4, DECODED_BYTES = 8, CHUNK = 8, DIRECT_ROWS = 4;
    static const bool BY_WORDS = true;
    /* One row takes a whole group: weights are read one after another, as memory gives them fastest. */
    static constexpr int columns(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }
    static constexpr int code_columns(int rows) { return rows <= 2 ? 4 : 2; }

    TARGET static INLINE Sum zero() { return _mm256_setzero_ps(); }
    TARGET static INLINE Sum load(const float* p) { return _mm256_loadu_ps(p); }
    TARGET static INLINE Sum broadcast(float x) { return _mm256_set1_ps(x); }
    TARGET static INLINE Sum multiply_add(Sum a, Sum b, Sum c) { return _mm256_fmadd_ps(a, b, c); }
    TARGET static INLINE Pair pair(const char* p) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)),
                _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000))))};
    }
    TARGET static INLINE Pair decoded(const char* p) {
        return {_mm256_load_ps(reinterpret_cast<const float*>(p)), _mm256_load_ps(reinterpret_cast<const float*>(p) + 8)};
    }
    TARGET static INLINE void keep(char* p, Pair w) {
        _mm256_store_ps(reinterpret_cast<float*>(p), w.even);
        _mm256_store_ps(reinterpret_cast<float*>(p) + 8, w.odd);
    }
    TARGET static INLINE __m256i constant(Tables tables, Constant which) {
        return _mm256_load_si256(reinterpret_cast<const __m256i*>(tables[which]));
    }
    /* Twice the values of the low four bits of every byte. */
    TARGET static INLINE __m256i look_up(Tables tables, __m256i words) {
        return _mm256_shuffle_epi8(constant(tables, TWICE), _mm256_and_si256(words, constant(tables, CODE)));
    }
    /* A byte of each word, moved to its top: as an integer it is 2^24 times the byte. */
    template <int BYTE>
    TARGET static INLINE __m256 top(Tables tables, __m256i words) {
        if (BYTE == 0) return _mm256_cvtepi32_ps(_mm256_slli_epi32(words, 24));
        if (BYTE == 3) return _mm256_cvtepi32_ps(_mm256_and_si256(words, constant(tables, TOP)));
        return _mm256_cvtepi32_ps(_mm256_shuffle_epi8(words, constant(tables, BYTE == 1 ? MOVE_1 : MOVE_2)));
    }
    /* Codes k and 4 + k of each word, 2^25 times their values: eight codes of a word are looked up with two shuffles of bytes. */
    TARGET static INLINE Pair decode(const char* p, int k) {
        const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        const __m256i twice = look_up(TABLES, k % 2 ? _mm256_srli_epi32(words, 4) : words);
        if (k < 2) return {top<0>(TABLES, twice), top<2>(TABLES, twice)};
        return {top<1>(TABLES, twice), top<3>(TABLES, twice)};
    }
    /* sums += 8 inputs, whose codes are one word per output. Up to four vectors of words go together: their bytes wait in registers and
     * their chains of sums run side by side. The tables stay in memory, where an instruction can take them from; the compiler would hold
     * them in registers and push sums out, so it is kept from knowing what the pointer points to. */
    template <int R, int C>
    TARGET static INLINE void add_word(const char* p, const Input* x, int64_t x_stride, Sum (&sums)[R][C]) {
        const int G = C < 4 ? C : 4;
        Tables tables = TABLES;
#pragma GCC unroll 2
        for (int first = 0; first < C; first += G) {
            asm("" : "+r"(tables), "+r"(x));
            __m256i low[G], high[G];
#pragma GCC unroll 4
            for (int c = 0; c < G; ++c) {
                const char* at = p + (first + c) * 32;
                const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
                if (R <= 2 && c % 2 == 0) __builtin_prefetch(at + AHEAD);
                low[c] = look_up(tables, words);
                high[c] = look_up(tables, _mm256_srli_epi32(words, 4));
            }
            add_byte<2>(tables, low, x + 1, x_stride, sums, first);
            add_byte<0>(tables, low, x + 0, x_stride, sums, first);
            add_byte<2>(tables, high, x + 3, x_stride, sums, first);
            add_byte<0>(tables, high, x + 2, x_stride, sums, first);
            add_byte<3>(tables, low, x + 5, x_stride, sums, first);
            add_byte<1>(tables, low, x + 4, x_stride, sums, first);
            add_byte<3>(tables, high, x + 7, x_stride, sums, first);
            add_byte<1>(tables, high, x + 6, x_stride, sums, first);
        }
    }
    /* sums += one input, whose codes are one byte of each word. */
    template <int BYTE, int G, int R, int C>
    TARGET static INLINE void add_byte(Tables tables, const __m256i (&twice)[G], const Input* x, int64_t x_stride, Sum (&sums)[R][C],
                                       int first) {
#pragma GCC unroll 4
        for (int c = 0; c < G; ++c) {
            const __m256 w = top<BYTE>(tables, twice[c]);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) sums[r][first + c] = _mm256_fmadd_ps(w, _mm256_set1_ps(x[r * x_stride]), sums[r][first + c]);
        }
    }
    TARGET static INLINE Sum dot(Sum sum) { return _mm256_mul_ps(sum, _mm256_set1_ps(0x1p-25f)); }
    TARGET static INLINE Both both(const Input* x) { return x; }
    TARGET static INLINE Sum add_pair(Sum sum, Pair w, Both x) {
        return _mm256_fmadd_ps(w.even, _mm256_set1_ps(x[0]), _mm256_fmadd_ps(w.odd, _mm256_set1_ps(x[1]), sum));
    }
    TARGET static INLINE Sum scale(const uint8_t* p) {
        const __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
        const __m256i bits = _mm256_max_epu32(_mm256_slli_epi32(e, 23), _mm256_set1_epi32(0x00400000));
        const __m256i nan = _mm256_cmpeq_epi32(e, _mm256_set1_epi32(255));
        return _mm256_castsi256_ps(_mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc00000), nan));
    }
    TARGET static INLINE void write(float* y, int64_t count, Sum sum, bool add) {
        if (count >= 8) { /* a store under a mask costs some processors twenty plain ones */
            _mm256_storeu_ps(y, add ? _mm256_add_ps(_mm256_loadu_ps(y), sum) : sum);
            return;
        }
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i some = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane);
        if (add) sum = _mm256_add_ps(_mm256_maskload_ps(y, some), sum);
        _mm256_maskstore_ps(y, some, sum);
    }
    TARGET static INLINE void round(const float* x, Input* to) {
        const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x));
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i nearest = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
        const __m256 nan = _mm256_cmp_ps(_mm256_castsi256_ps(bits), _mm256_castsi256_ps(bits), _CMP_UNORD_Q);
        const __m256i kept = _mm256_blendv_epi8(nearest, quiet, _mm256_castps_si256(nan));
        _mm256_storeu_ps(to, _mm256_castsi256_ps(_mm256_and_si256(kept, _mm256_set1_epi32(static_cast<int>(0xffff0000)))));
    }
};

#include "matrix_tile.h"

}  // namespace

const Kernels kernels_v3 = kernels<Set>();

}  // namespace gnomon
#endif
