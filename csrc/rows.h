/* Rows: inner products and norms, shared by the operators that end or begin with them. */
#pragma once

#include <cmath>
#include <cstdint>

#include "lanes.h"

template <int W>
INLINE float dot(const float* x, const float* y, int64_t n) {
    vec<W> lanes = {}, more = {};
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W) {
        lanes += load<W>(x + i) * load<W>(y + i);
        more += load<W>(x + i + W) * load<W>(y + i + W);
    }
    for (; i + W <= n; i += W) lanes += load<W>(x + i) * load<W>(y + i);
    float rest = 0.0f;
    for (; i < n; ++i) rest += x[i] * y[i];
    return sum<W>(lanes + more) + rest;
}

/* x rounded to bf16, to nearest even; what is not a number stays so. */
template <int W>
INLINE vec<W> round_bf16(vec<W> x) {
    typedef typename Lanes<W>::ints ints;
    ints bits;
    std::memcpy(&bits, &x, sizeof bits);
    const ints rounded = (bits + 0x7fff + (bits >> 16 & 1)) & static_cast<int32_t>(0xffff0000);
    const ints kept = x == x ? rounded : bits | 0x400000;
    vec<W> result;
    std::memcpy(&result, &kept, sizeof result);
    return result;
}

/* y = x / sqrt(mean x^2 + eps) * weight, times sigmoid(gate) unless it is NULL; y may be x. With `coarse` the norm is rounded to bf16
 * before the weight multiplies. */
template <int W>
INLINE void rms_row_body(const float* x, const float* weight, const float* gate, int64_t n, float eps, float* y, bool coarse = false) {
    const float inverse = 1.0f / std::sqrt(dot<W>(x, x, n) / n + eps);
    for (int64_t i = 0; i < n; i += W) {
        const int64_t width = n - i < W ? n - i : W;
        vec<W> out = load_some<W>(x + i, width) * inverse;
        if (coarse) out = round_bf16<W>(out);
        out *= load_some<W>(weight + i, width);
        if (gate) out *= sigmoid<W>(load_some<W>(gate + i, width));
        store_some<W>(y + i, width, out);
    }
}
