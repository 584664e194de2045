/* One row of the depth read, for training and inference alike. */
#pragma once

#include <cmath>

#include "lanes.h"

/* sum a b and sum b b over `width` values. */
template <int W>
INLINE void products(const float* a, const float* b, int64_t width, float* ab, float* bb) {
    vec<W> x = {}, y = {}, x2 = {}, y2 = {}; /* two chains of additions hide the latency of one */
    int64_t i = 0;
    for (; i + 2 * W <= width; i += 2 * W) {
        const vec<W> v = load<W>(b + i), v2 = load<W>(b + i + W);
        x += load<W>(a + i) * v;
        x2 += load<W>(a + i + W) * v2;
        y += v * v;
        y2 += v2 * v2;
    }
    x += x2;
    y += y2;
    float tail_ab = 0.0f, tail_bb = 0.0f;
    for (; i < width; ++i) tail_ab += a[i] * b[i], tail_bb += b[i] * b[i];
    *ab = sum<W>(x) + tail_ab;
    *bb = sum<W>(y) + tail_bb;
}

/* <query, v> / rms(v), and 1 / rms(v). */
template <int W>
INLINE float score(const float* query, const float* v, int64_t width, float eps, float* inverse_rms) {
    float inner, square;
    products<W>(query, v, width, &inner, &square);
    *inverse_rms = 1.0f / std::sqrt(square / static_cast<float>(width) + eps);
    return inner * *inverse_rms;
}
