/* The short causal depth-wise convolution with SiLU. What each function computes stands in gnomon.h.
 *
 * A task owns a block of channels and walks all documents, so taps stay in the cache and their gradients need no reduction. */
#include <algorithm>
#include <vector>

#include "gnomon.h"
#include "lanes.h"

namespace {

constexpr int64_t BLOCK = 64; /* channels of a task */

struct Conv {
    const float *u, *history, *d_y;
    float *y, *d_u, *d_weight, *d_history;
    const int64_t* bounds;
    int64_t documents, channels, taps, first, width; /* this task's channels are [first, first + width) */
    float* scratch; /* taps * BLOCK weights by tap, then as many gradients of them, then a ring of as many pre-activation gradients */
};

/* The input at position p of document d: an earlier token, the history, or nothing. */
INLINE const float* input(const Conv& a, int64_t d, int64_t p) {
    if (p >= 0) return a.u + (a.bounds[d] + p) * a.channels + a.first;
    return a.history ? a.history + (d * (a.taps - 1) + a.taps - 1 + p) * a.channels + a.first : nullptr;
}

/* The sum of taps for one vector of channels at token t. */
template <int W>
INLINE vec<W> convolve(const Conv& a, int64_t d, int64_t t, int64_t i, int64_t lanes) {
    vec<W> total = {};
    for (int64_t j = 0; j < a.taps; ++j) {
        const float* row = input(a, d, t - a.taps + 1 + j);
        if (row) total += load<W>(a.scratch + j * BLOCK + i) * load_some<W>(row + i, lanes);
    }
    return total;
}

template <int W>
INLINE void conv_block_body(const Conv& a) {
    for (int64_t d = 0; d < a.documents; ++d)
        for (int64_t t = 0; t < a.bounds[d + 1] - a.bounds[d]; ++t)
            for (int64_t i = 0; i < a.width; i += W) {
                const int64_t lanes = std::min<int64_t>(W, a.width - i);
                const vec<W> x = convolve<W>(a, d, t, i, lanes);
                store_some<W>(a.y + (a.bounds[d] + t) * a.channels + a.first + i, lanes, x * sigmoid<W>(x));
            }
}
DISPATCH(conv_block, (const Conv& a), (a))

/* Position p of the input feeds tokens p to p + taps - 1: once the last of these is known, its gradient is complete. */
template <int W>
INLINE void conv_block_back_body(const Conv& a) {
    const float* weight = a.scratch;
    float *d_weight = a.scratch + a.taps * BLOCK, *ring = a.scratch + 2 * a.taps * BLOCK;
    for (int64_t d = 0; d < a.documents; ++d) {
        const int64_t length = a.bounds[d + 1] - a.bounds[d];
        std::fill(ring, ring + a.taps * BLOCK, 0.0f);
        for (int64_t p = 1 - a.taps; p < length; ++p) {
            const int64_t t = p + a.taps - 1;
            float* target = p >= 0 ? a.d_u + (a.bounds[d] + p) * a.channels + a.first
                                   : a.d_history + (d * (a.taps - 1) + t) * a.channels + a.first;
            for (int64_t i = 0; i < a.width; i += W) {
                const int64_t lanes = std::min<int64_t>(W, a.width - i);
                vec<W> d_x = {};
                if (t < length) {
                    const vec<W> x = convolve<W>(a, d, t, i, lanes), s = sigmoid<W>(x), one = vec<W>{} + 1.0f;
                    d_x = load_some<W>(a.d_y + (a.bounds[d] + t) * a.channels + a.first + i, lanes) * s * (one + x * (one - s));
                    for (int64_t j = 0; j < a.taps; ++j)
                        if (const float* row = input(a, d, t - a.taps + 1 + j))
                            store<W>(d_weight + j * BLOCK + i, load<W>(d_weight + j * BLOCK + i) + d_x * load_some<W>(row + i, lanes));
                }
                store<W>(ring + t % a.taps * BLOCK + i, d_x);
                vec<W> total = {};
                for (int64_t j = 0; j < a.taps && j <= t; ++j)
                    total += load<W>(weight + j * BLOCK + i) * load<W>(ring + (t - j) % a.taps * BLOCK + i);
                store_some<W>(target + i, lanes, total);
            }
        }
    }
}
DISPATCH(conv_block_back, (const Conv& a), (a))

void load_taps(const float* weight, Conv& a) {
    std::fill(a.scratch, a.scratch + 3 * a.taps * BLOCK, 0.0f);
    for (int64_t i = 0; i < a.width; ++i)
        for (int64_t j = 0; j < a.taps; ++j) a.scratch[j * BLOCK + i] = weight[(a.first + i) * a.taps + j];
}

}  // namespace

extern "C" void gnomon_short_conv_forward(const float* u, const float* weight, const float* history, const int64_t* bounds,
                                          int64_t documents, int64_t channels, int64_t taps, float* y, int32_t threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> scratch(3 * taps * BLOCK);
#pragma omp for schedule(dynamic)
        for (int64_t first = 0; first < channels; first += BLOCK) {
            Conv a{u, history, nullptr, y, nullptr, nullptr, nullptr, bounds, documents, channels, taps, first,
                   std::min(BLOCK, channels - first), scratch.data()};
            load_taps(weight, a);
            conv_block(a);
        }
    }
}

extern "C" void gnomon_short_conv_backward(const float* u, const float* weight, const float* history, const float* d_y,
                                           const int64_t* bounds, int64_t documents, int64_t channels, int64_t taps, float* d_u,
                                           float* d_weight, float* d_history, int32_t threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> scratch(3 * taps * BLOCK);
#pragma omp for schedule(dynamic)
        for (int64_t first = 0; first < channels; first += BLOCK) {
            Conv a{u, history, d_y, nullptr, d_u, d_weight, d_history, bounds, documents, channels, taps, first,
                   std::min(BLOCK, channels - first), scratch.data()};
            load_taps(weight, a);
            conv_block_back(a);
            for (int64_t i = 0; i < a.width; ++i)
                for (int64_t j = 0; j < taps; ++j) d_weight[(first + i) * taps + j] = scratch[(taps + j) * BLOCK + i];
        }
    }
}
