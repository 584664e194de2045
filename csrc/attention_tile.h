/* Products of attention: rows of A times panels of B, the operands fp32 or bf16, sums fp32.
 *
 * Operands are seen as 32-bit words: one float, or two neighbouring bf16 along the summed direction. A is row by row; B is in panels of 16
 * outputs, [panel][words][16], the layout of matrix.h. Every output is one chain of additions from the first word to the last (in a pair
 * the odd input first, as the AVX512-BF16 instruction does), so it does not depend on how many rows are computed together.
 */
#pragma once

#include <cstdlib>
#include <type_traits>
#include <utility>

#include "lanes.h"
#include "matrix.h"
#include "memory.h"

namespace gnomon::attention {

typedef uint32_t word;

/* How a product is computed: fp32 operands; bf16 operands with plain instructions; with the AVX512-BF16 instruction. */
enum Operands { SINGLE, PAIRS, DOTS };

template <int F>
using element = typename std::conditional<F == SINGLE, float, uint16_t>::type;
template <int F>
constexpr int64_t per_word = F == SINGLE ? 1 : 2;

INLINE int64_t words_for(int64_t values, int64_t in_a_word) { return (values + in_a_word - 1) / in_a_word; }
INLINE int64_t panels_for(int64_t values) { return (values + PANEL - 1) / PANEL; }

/* `count` values without a first value, aligned for any vector. */
template <class T>
struct Scratch {
    T* data;
    explicit Scratch(int64_t count) : data(static_cast<T*>(allocate(count * static_cast<int64_t>(sizeof(T))))) {}
    ~Scratch() { std::free(data); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    operator T*() const { return data; }
};

/* c[row][0..16 panels) = keep[row] c[row] + a[row] b; without `keep` the first term is zero. The sum goes over the first `words` of the
 * `panel_words` word rows of each panel of b. */
struct Product {
    const word* a;
    int64_t a_stride;
    const word* b;
    int64_t panel_words, words, panels;
    float* c;
    int64_t c_stride;
    const float* keep;
};

/* The product of so many rows, for operands of a format on this machine. */
typedef void (*Multiply)(const Product&, int64_t rows);
Multiply multiply_rows(int32_t format);

template <int W>
using words_of = typename Lanes<W>::ints;

INLINE float as_float(word x) {
    float y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}

/* ---- rows of elements and their words */

INLINE float widen(float x) { return x; }
INLINE float widen(uint16_t x) { return as_float(static_cast<word>(x) << 16); }

/* To bf16, to nearest even; what is not a number stays so. */
INLINE uint16_t narrow(float x) {
    word bits;
    std::memcpy(&bits, &x, sizeof bits);
    const word rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16, quiet = bits >> 16 | 0x40u;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

INLINE void convert(float x, float* y) { *y = x; }
INLINE void convert(float x, uint16_t* y) { *y = narrow(x); }

/* out[0..count) = in[0..count) in another type, zeros up to `padded`. */
template <class From, class To>
INLINE void copy_row(const From* in, int64_t count, int64_t padded, To* out) {
    if constexpr (std::is_same<From, To>::value) std::memcpy(out, in, count * sizeof(To));
    else for (int64_t i = 0; i < count; ++i) convert(widen(in[i]), out + i);
    for (int64_t i = count; i < padded; ++i) out[i] = To{};
}

/* The words of B for rows of B that follow one another: row(s) `r` (and `r + 1` of a pair, or null for zeros) of `count` elements become
 * word row `at` of panels with `words` word rows. */
template <int F>
INLINE void weave(const element<F>* first, const element<F>* second, int64_t count, int64_t words, int64_t at, word* panels) {
    for (int64_t panel = 0; panel < panels_for(count); ++panel) {
        word* out = panels + (panel * words + at) * PANEL;
        const int64_t left = count - panel * PANEL < PANEL ? count - panel * PANEL : PANEL;
        element<F> a[PANEL] = {}, b[PANEL] = {};
        if (left == PANEL) std::memcpy(a, first + panel * PANEL, sizeof a);
        else for (int64_t i = 0; i < left; ++i) a[i] = first[panel * PANEL + i];
        if constexpr (F == SINGLE) {
            std::memcpy(out, a, sizeof a);
        } else {
            if (second && left == PANEL) std::memcpy(b, second + panel * PANEL, sizeof b);
            else if (second) for (int64_t i = 0; i < left; ++i) b[i] = second[panel * PANEL + i];
            for (int64_t i = 0; i < PANEL; ++i) out[i] = a[i] | static_cast<word>(b[i]) << 16;
        }
    }
}

template <int W, int STEP, size_t... I>
INLINE void exchange(words_of<W>& a, words_of<W>& b, std::index_sequence<I...>) {
    const words_of<W> x = a, y = b;
    a = __builtin_shufflevector(x, y, (I & STEP ? W + I - STEP : I)...);
    b = __builtin_shufflevector(x, y, (I & STEP ? W + I : I + STEP)...);
}

template <int W, int STEP>
INLINE void transpose_steps(words_of<W> (&x)[W]) {
    if constexpr (STEP < W) {
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i)
            if (!(i & STEP)) exchange<W, STEP>(x[i], x[i + STEP], std::make_index_sequence<W>{});
        transpose_steps<W, 2 * STEP>(x);
    }
}

/* The words of B for outputs that are rows in memory: 16 rows, `stride` words apart, of `words` words become one panel [words][16]. */
template <int W>
INLINE void transpose_panel(const word* rows, int64_t stride, int64_t words, word* panel) {
    int64_t at = 0;
    for (; at + W <= words; at += W) {
        for (int64_t part = 0; part < PANEL; part += W) {
            words_of<W> x[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) std::memcpy(&x[i], rows + (part + i) * stride + at, sizeof x[i]);
            transpose_steps<W, 1>(x);
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) std::memcpy(panel + (at + i) * PANEL + part, &x[i], sizeof x[i]);
        }
    }
    for (; at < words; ++at)
        for (int64_t i = 0; i < PANEL; ++i) panel[at * PANEL + i] = rows[i * stride + at];
}

/* name(format) is name_body<W, F> for the best instruction set and the operands' format. */
#if defined(__x86_64__) && defined(__GNUC__)
#define DISPATCH_OPERANDS(name, signature, arguments)                                                                                  \
    __attribute__((target("arch=x86-64-v4,avx512bf16"))) static void name##_dots signature { name##_body<16, DOTS> arguments; }        \
    __attribute__((target("arch=x86-64-v4"))) static void name##_single_v4 signature { name##_body<16, SINGLE> arguments; }            \
    __attribute__((target("arch=x86-64-v4"))) static void name##_pairs_v4 signature { name##_body<16, PAIRS> arguments; }              \
    __attribute__((target("arch=x86-64-v3"))) static void name##_single_v3 signature { name##_body<8, SINGLE> arguments; }             \
    __attribute__((target("arch=x86-64-v3"))) static void name##_pairs_v3 signature { name##_body<8, PAIRS> arguments; }               \
    static void name##_single signature { name##_body<4, SINGLE> arguments; }                                                          \
    static void name##_pairs signature { name##_body<4, PAIRS> arguments; }                                                            \
    static auto* name(int32_t format) {                                                                                                \
        static const int set = instruction_set();                                                                                      \
        static const bool dots = has_bf16_dots();                                                                                      \
        if (format == F32) return set == 4 ? name##_single_v4 : set == 3 ? name##_single_v3 : name##_single;                           \
        return dots ? name##_dots : set == 4 ? name##_pairs_v4 : set == 3 ? name##_pairs_v3 : name##_pairs;                            \
    }
#else
#define DISPATCH_OPERANDS(name, signature, arguments)                                       \
    static void name##_single signature { name##_body<4, SINGLE> arguments; }               \
    static void name##_pairs signature { name##_body<4, PAIRS> arguments; }                 \
    static auto* name(int32_t format) { return format == F32 ? name##_single : name##_pairs; }
#endif

}  // namespace gnomon::attention
