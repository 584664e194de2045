/* The log decay of Kimi Delta Attention from its logits, with a bound (report equation 5). What each function computes stands in gnomon.h.
 * Gradients of what all rows share are summed by blocks of rows, so that the threads change no bit. */
#include <algorithm>
#include <cmath>
#include <vector>

#include "gnomon.h"
#include "lanes.h"
#include "regions.h"

namespace {

constexpr int64_t BLOCK = 256; /* rows of a task */

struct Decay {
    const float *z, *bias, *rate, *d_g; /* rate [heads] */
    float *g, *d_z, *d_bias, *d_rate;   /* the last two of this block of rows: [heads, width] each */
    float bound;
    int64_t heads, width;
};

template <int W>
INLINE vec<W> logit(const Decay& a, int64_t row, int64_t c, int64_t some) {
    const vec<W> z = load_some<W>(a.z + row * a.heads * a.width + c, some);
    return a.bias ? z + load_some<W>(a.bias + c, some) : z;
}

template <int W>
INLINE void forward_row_body(const Decay& a, int64_t row) {
    for (int64_t h = 0; h < a.heads; ++h)
        for (int64_t i = 0; i < a.width; i += W) {
            const int64_t c = h * a.width + i, some = std::min<int64_t>(W, a.width - i);
            store_some<W>(a.g + row * a.heads * a.width + c, some, a.bound * sigmoid<W>(a.rate[h] * logit<W>(a, row, c, some)));
        }
}
DISPATCH(forward_row, (const Decay& a, int64_t row), (a, row))

template <int W>
INLINE void backward_row_body(const Decay& a, int64_t row) {
    for (int64_t h = 0; h < a.heads; ++h)
        for (int64_t i = 0; i < a.width; i += W) {
            const int64_t c = h * a.width + i, at = row * a.heads * a.width + c, some = std::min<int64_t>(W, a.width - i);
            const vec<W> g = load_some<W>(a.g + at, some), d = load_some<W>(a.d_g + at, some) * g * (1.0f - g / a.bound);
            const vec<W> d_z = d * a.rate[h];
            store_some<W>(a.d_z + at, some, d_z);
            store_some<W>(a.d_bias + c, some, load_some<W>(a.d_bias + c, some) + d_z);
            store_some<W>(a.d_rate + c, some, load_some<W>(a.d_rate + c, some) + d_z * logit<W>(a, row, c, some));
        }
}
DISPATCH(backward_row, (const Decay& a, int64_t row), (a, row))

std::vector<float> rates(const float* a_log, int64_t heads) {
    std::vector<float> rate(heads);
    for (int64_t h = 0; h < heads; ++h) rate[h] = std::exp(a_log[h]);
    return rate;
}

}  // namespace

extern "C" void gnomon_decay_forward(const float* z, const float* bias, const float* a_log, float lower_bound, int64_t rows, int64_t heads,
                                     int64_t width, float* g, int32_t threads) {
    const std::vector<float> rate = rates(a_log, heads);
    const Decay a{z, bias, rate.data(), nullptr, g, nullptr, nullptr, nullptr, lower_bound, heads, width};
    each_task(threads, (rows + BLOCK - 1) / BLOCK, [&](int64_t block, int) {
        for (int64_t r = block * BLOCK; r < std::min(rows, (block + 1) * BLOCK); ++r) forward_row(a, r);
    });
}

extern "C" void gnomon_decay_backward(const float* z, const float* bias, const float* a_log, const float* g, const float* d_g,
                                      float lower_bound, int64_t rows, int64_t heads, int64_t width, float* d_z, float* d_bias,
                                      float* d_a_log, int32_t threads) {
    const std::vector<float> rate = rates(a_log, heads);
    const int64_t blocks = (rows + BLOCK - 1) / BLOCK, size = heads * width;
    std::vector<float> partial(blocks * 2 * size, 0.0f);
    each_task(threads, blocks, [&](int64_t block, int) {
        float* mine = partial.data() + block * 2 * size;
        const Decay a{z, bias, rate.data(), d_g, const_cast<float*>(g), d_z, mine, mine + size, lower_bound, heads, width};
        for (int64_t r = block * BLOCK; r < std::min(rows, (block + 1) * BLOCK); ++r) backward_row(a, r);
    });
    std::fill_n(d_bias, size, 0.0f);
    std::fill_n(d_a_log, heads, 0.0f);
    for (int64_t block = 0; block < blocks; ++block)
        for (int64_t c = 0; c < size; ++c) {
            d_bias[c] += partial[block * 2 * size + c];
            d_a_log[c / width] += partial[(block * 2 + 1) * size + c];
        }
}
