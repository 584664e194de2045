/* MXFP4 and MXFP8 (report section 4.1.4): to codes, from codes, and both at once. What the numbers mean stands in
 * src/gnomon/kernels/mxfp/reference.py, whose results these are to the last bit.
 */
#include <algorithm>
#include <cstring>

#include "gnomon.h"
#include "lanes.h"
#include "pool.h"

namespace {

const int64_t BLOCK = 32;
const int64_t TASK = 1 << 9; /* blocks of one task */
const uint8_t NOT_A_NUMBER = 255;

struct Blocks {
    const float* in;
    float* out;
    uint8_t *codes, *scales; /* of all blocks */
    int64_t first, last;
    int32_t ceil;
};

template <int W>
using ints = typename Lanes<W>::ints;

template <int W>
INLINE vec<W> as_floats(ints<W> bits) {
    vec<W> x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

template <int W>
INLINE ints<W> as_bits(vec<W> x) {
    ints<W> bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Nearest integer, ties to even, for magnitudes far below 2^22. */
template <int W>
INLINE vec<W> nearest(vec<W> x) {
    const vec<W> shift = vec<W>{} + 12582912.0f;
    return (x + shift) - shift;
}

/* The two element formats: rounding a scaled magnitude (saturating), and the code of a rounded one. */
struct E2M1 {
    static constexpr int32_t EXPONENT = 2, CARRY = 0x200000, CARRY_CEIL = 0x3fffff;
    template <int W>
    INLINE static vec<W> round(vec<W> m) {
        m = m > 6.0f ? vec<W>{} + 6.0f : m;
        return m < 2.0f ? nearest<W>(m * 2.0f) * 0.5f : m < 4.0f ? nearest<W>(m) : nearest<W>(m * 0.5f) * 2.0f;
    }
    template <int W>
    INLINE static ints<W> code(vec<W> m) {
        return __builtin_convertvector(m < 2.0f ? m * 2.0f : m < 4.0f ? m + 2.0f : m * 0.5f + 4.0f, ints<W>);
    }
    /* A negative number that rounds to zero keeps its sign; zero has none. */
    template <int W>
    INLINE static ints<W> negative(vec<W> scaled) {
        return scaled < vec<W>{};
    }
};

struct E4M3 {
    static constexpr int32_t EXPONENT = 8, CARRY = 0x200000, CARRY_CEIL = 0x1fffff;
    template <int W>
    INLINE static vec<W> round(vec<W> m) {
        m = m < 448.0f ? m : vec<W>{} + 448.0f; /* NaN too, whose bits would overflow below; its block's scale is NaN */
        const ints<W> bits = as_bits<W>(m), up = bits + 0x7ffff + ((bits >> 20) & 1);
        return m < 0x1p-6f ? nearest<W>(m * 512.0f) * 0x1p-9f : as_floats<W>(up & static_cast<int32_t>(0xfff00000));
    }
    template <int W>
    INLINE static ints<W> code(vec<W> m) {
        return m < 0x1p-6f ? __builtin_convertvector(m * 512.0f, ints<W>) : (as_bits<W>(m) >> 20) - (120 << 3);
    }
    template <int W>
    INLINE static ints<W> negative(vec<W> scaled) {
        return as_bits<W>(scaled) < ints<W>{};
    }
};

/* The scale byte of one block. */
template <class F, int W>
INLINE int32_t scale_of(const float* x, int32_t ceil) {
    ints<W> most = {};
    for (int64_t i = 0; i < BLOCK; i += W) {
        const ints<W> size = as_bits<W>(load<W>(x + i)) & 0x7fffffff;
        most = size > most ? size : most; /* bits of magnitudes order as the magnitudes do, what is not finite last */
    }
    int32_t largest = 0;
    for (int j = 0; j < W; ++j) largest = std::max<int32_t>(largest, most[j]);
    if (largest >= 0x7f800000) return NOT_A_NUMBER;
    return std::max((largest + (ceil ? F::CARRY_CEIL : F::CARRY)) >> 23, F::EXPONENT) - F::EXPONENT;
}

template <class F, int W>
INLINE void round_blocks(const Blocks& b) {
    for (int64_t block = b.first; block < b.last; ++block) {
        const float* x = b.in + block * BLOCK;
        float* y = b.out + block * BLOCK;
        const int32_t e = scale_of<F, W>(x, b.ceil);
        const float scale = scale_value(e), inverse = e == NOT_A_NUMBER ? scale : scale_value(254 - e);
        for (int64_t i = 0; i < BLOCK; i += W) {
            const vec<W> scaled = load<W>(x + i) * inverse;
            const vec<W> size = F::template round<W>(as_floats<W>(as_bits<W>(scaled) & 0x7fffffff));
            const vec<W> value = F::template negative<W>(scaled) ? -size : size;
            store<W>(y + i, value * scale);
        }
    }
}

/* Codes of one block, one per element. */
template <class F, int W>
INLINE void encode_block(const float* x, int32_t e, int32_t sign, uint8_t* codes) {
    if (e == NOT_A_NUMBER) {
        std::memset(codes, sign == 8 ? 0 : 0x7f, BLOCK);
        return;
    }
    const float inverse = scale_value(254 - e);
    for (int64_t i = 0; i < BLOCK; i += W) {
        const vec<W> scaled = load<W>(x + i) * inverse;
        ints<W> code = F::template code<W>(F::template round<W>(as_floats<W>(as_bits<W>(scaled) & 0x7fffffff)));
        code |= F::template negative<W>(scaled) & sign;
        for (int j = 0; j < W; ++j) codes[i + j] = static_cast<uint8_t>(code[j]);
    }
}

template <int W>
INLINE void encode4_body(const Blocks& b) {
    for (int64_t block = b.first; block < b.last; ++block) {
        uint8_t codes[BLOCK];
        const int32_t e = scale_of<E2M1, W>(b.in + block * BLOCK, b.ceil);
        encode_block<E2M1, W>(b.in + block * BLOCK, e, 8, codes);
        b.scales[block] = static_cast<uint8_t>(e);
        for (int64_t i = 0; i < BLOCK / 2; ++i) b.codes[block * BLOCK / 2 + i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
    }
}

template <int W>
INLINE void encode8_body(const Blocks& b) {
    for (int64_t block = b.first; block < b.last; ++block) {
        const int32_t e = scale_of<E4M3, W>(b.in + block * BLOCK, b.ceil);
        encode_block<E4M3, W>(b.in + block * BLOCK, e, 128, b.codes + block * BLOCK);
        b.scales[block] = static_cast<uint8_t>(e);
    }
}

struct Table {
    float of[256];
    Table(bool eight) {
        static const float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
        for (int code = 0; code < 256; ++code) {
            const int size = code & 127;
            const float small = static_cast<float>(size) * 0x1p-9f, large = scale_value((size >> 3) + 120) * (1.0f + (size & 7) * 0.125f);
            const float value = eight ? (size == 127 ? scale_value(NOT_A_NUMBER) : size < 8 ? small : large) : magnitudes[code & 7];
            of[code] = code & (eight ? 128 : 8) ? -value : value;
        }
    }
};

/* Values of blocks of codes: one lookup per code, times the block's scale. */
void decode(const Blocks& b, const Table& table, bool eight) {
    for (int64_t block = b.first; block < b.last; ++block) {
        const float scale = scale_value(b.scales[block]);
        float* y = b.out + block * BLOCK;
        if (eight) {
            for (int64_t i = 0; i < BLOCK; ++i) y[i] = table.of[b.codes[block * BLOCK + i]] * scale;
        } else {
            for (int64_t i = 0; i < BLOCK / 2; ++i) {
                const uint8_t pair = b.codes[block * BLOCK / 2 + i];
                y[2 * i] = table.of[pair & 15] * scale;
                y[2 * i + 1] = table.of[pair >> 4] * scale;
            }
        }
    }
}

template <int W>
INLINE void round4_body(const Blocks& b) { round_blocks<E2M1, W>(b); }
template <int W>
INLINE void round8_body(const Blocks& b) { round_blocks<E4M3, W>(b); }

DISPATCH(encode4, (const Blocks& b), (b))
DISPATCH(encode8, (const Blocks& b), (b))
DISPATCH(round4, (const Blocks& b), (b))
DISPATCH(round8, (const Blocks& b), (b))

/* `run` on pieces of `blocks` blocks. */
template <class F>
void share(Blocks b, int64_t blocks, int32_t threads, F&& run) {
    gnomon::parallel(gnomon::pool(threads), (blocks + TASK - 1) / TASK, [&](int64_t task, int) {
        Blocks part = b;
        part.first = task * TASK;
        part.last = std::min(blocks, part.first + TASK);
        run(part);
    });
}

}  // namespace

extern "C" void gnomon_mxfp_encode(const float* x, int64_t blocks, int32_t bits, int32_t ceil, uint8_t* codes, uint8_t* scales,
                                   int32_t threads) {
    share({x, nullptr, codes, scales, 0, 0, ceil}, blocks, threads, [&](const Blocks& b) { bits == 4 ? encode4(b) : encode8(b); });
}

extern "C" void gnomon_mxfp_decode(const uint8_t* codes, const uint8_t* scales, int64_t blocks, int32_t bits, float* x, int32_t threads) {
    static const Table four(false), eight(true);
    const Blocks all{nullptr, x, const_cast<uint8_t*>(codes), const_cast<uint8_t*>(scales), 0, 0, 0};
    share(all, blocks, threads, [&](const Blocks& b) { decode(b, bits == 4 ? four : eight, bits == 8); });
}

extern "C" void gnomon_mxfp_round(const float* x, int64_t blocks, int32_t bits, int32_t ceil, float* rounded, int32_t threads) {
    share({x, rounded, nullptr, nullptr, 0, 0, ceil}, blocks, threads, [&](const Blocks& b) { bits == 4 ? round4(b) : round8(b); });
}
