/* Short vectors of W floats with the compiler's own vector type, and the choice of an instruction set at run time.
 *
 * A kernel is a template over W; DISPATCH instantiates it once per instruction set and calls the best one that the machine has.
 * That is what target_clones does, but the width is explicit and the accumulators stay in registers on every set.
 */
#pragma once

#include <cstdint>
#include <cstring>

#define INLINE __attribute__((always_inline)) inline

template <int W>
struct Lanes {
    typedef float type __attribute__((vector_size(W * sizeof(float))));
    typedef int32_t ints __attribute__((vector_size(W * sizeof(int32_t))));
};
template <int W>
using vec = typename Lanes<W>::type;

template <int W>
INLINE vec<W> load(const float* p) {
    vec<W> x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

template <int W>
INLINE void store(float* p, vec<W> x) {
    std::memcpy(p, &x, sizeof x);
}

/* The first n of W values, zero beyond; and writing only the first n. */
template <int W>
INLINE vec<W> load_some(const float* p, int64_t n) {
    if (n == W) return load<W>(p);
    vec<W> x = {};
    std::memcpy(&x, p, n * sizeof(float));
    return x;
}

template <int W>
INLINE void store_some(float* p, int64_t n, vec<W> x) {
    if (n == W) store<W>(p, x);
    else std::memcpy(p, &x, n * sizeof(float));
}

template <int W>
INLINE float sum(vec<W> x) {
    if constexpr (W == 1) {
        return x[0];
    } else {
        const vec<W / 2> low = load<W / 2>(reinterpret_cast<const float*>(&x));
        const vec<W / 2> high = load<W / 2>(reinterpret_cast<const float*>(&x) + W / 2);
        return sum<W / 2>(low + high);
    }
}

/* 2^(e - 127), what the byte e of an MX scale stands for; NaN for 255. */
inline float scale_value(int32_t e) {
    const int32_t bits = e == 255 ? 0x7fc00000 : e == 0 ? 0x00400000 : e << 23;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

/* exp(x) to about one unit in the last place; zero below the normal range of fp32, and what is not a number stays so. */
template <int W>
INLINE vec<W> exponential(vec<W> x) {
    typedef typename Lanes<W>::ints ints;
    const vec<W> zero = {};
    x = x > 88.0f ? zero + 88.0f : x;
    const ints tiny = x < zero - 87.0f;
    const vec<W> y = tiny ? zero : x;
    const vec<W> scaled = y * 1.44269504088896341f;
    const ints n = __builtin_convertvector(scaled + (y < zero ? zero - 0.5f : zero + 0.5f), ints);
    const vec<W> whole = __builtin_convertvector(n, vec<W>);
    vec<W> r = y - whole * 0.693359375f; /* ln 2 in two parts: the first is exact when multiplied by a small integer */
    r = r + whole * 2.12194440e-4f;
    vec<W> p = zero + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const ints bits = (n + 127) << 23;
    vec<W> power;
    std::memcpy(&power, &bits, sizeof power);
    return tiny ? zero : p * power;
}

template <int W>
INLINE vec<W> sigmoid(vec<W> x) {
    const vec<W> zero = {};
    return 1.0f / (1.0f + exponential<W>(zero - x));
}

#if defined(__x86_64__) && defined(__GNUC__)
#define DISPATCH(name, signature, arguments)                                                            \
    __attribute__((target("arch=x86-64-v4"))) static void name##_v4 signature { name##_body<16> arguments; } \
    __attribute__((target("arch=x86-64-v3"))) static void name##_v3 signature { name##_body<8> arguments; }  \
    static void name##_portable signature { name##_body<4> arguments; }                                  \
    static void name signature {                                                                          \
        static const int set = instruction_set();                                                         \
        if (set == 4) name##_v4 arguments;                                                                \
        else if (set == 3) name##_v3 arguments;                                                           \
        else name##_portable arguments;                                                                   \
    }
#else
#define DISPATCH(name, signature, arguments) \
    static void name signature { name##_body<4> arguments; }
#endif

/* 4 or 3 for x86-64-v4 or -v3, else 0. GNOMON_INSTRUCTION_SET=3 or 0 in the environment lowers it, for tests. */
int instruction_set();

/* Whether that set comes with the AVX512-BF16 instructions; "4-nobf16" in the same variable leaves them out. */
bool has_bf16_dots();
