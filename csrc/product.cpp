/* Dense fp32 products on one thread: the packing and the register-blocked kernel behind product.h. */
#include "product.h"

#include <algorithm>

#include "lanes.h"

namespace {

using gnomon::STRIPE;
using gnomon::Product;

/* Four rows of four, transposed. */
INLINE void transpose_four(const float* from, int64_t stride, float* to, int64_t to_stride) {
    typedef typename Lanes<4>::ints ints;
    const vec<4> a = load<4>(from), b = load<4>(from + stride), c = load<4>(from + 2 * stride), d = load<4>(from + 3 * stride);
    const vec<4> ab_low = __builtin_shuffle(a, b, ints{0, 4, 1, 5}), ab_high = __builtin_shuffle(a, b, ints{2, 6, 3, 7});
    const vec<4> cd_low = __builtin_shuffle(c, d, ints{0, 4, 1, 5}), cd_high = __builtin_shuffle(c, d, ints{2, 6, 3, 7});
    store<4>(to, __builtin_shuffle(ab_low, cd_low, ints{0, 1, 4, 5}));
    store<4>(to + to_stride, __builtin_shuffle(ab_low, cd_low, ints{2, 3, 6, 7}));
    store<4>(to + 2 * to_stride, __builtin_shuffle(ab_high, cd_high, ints{0, 1, 4, 5}));
    store<4>(to + 3 * to_stride, __builtin_shuffle(ab_high, cd_high, ints{2, 3, 6, 7}));
}

/* Where element (i, k) of A lies: stored by columns or by rows. */
template <bool T>
INLINE int64_t at(int64_t i, int64_t k, int64_t stride) {
    return T ? k * stride + i : i * stride + k;
}

/* R rows of C in V vectors; the accumulators stay in registers over the whole of k. */
template <int W, int R, int V, bool T>
INLINE void block(const float* a, int64_t stride, const float* b, int64_t b_stride, int64_t k, float* c, int64_t c_stride, int64_t columns,
                  bool add) {
    vec<W> sum[R][V];
    for (int i = 0; i < R; ++i)
        for (int j = 0; j < V; ++j) {
            const int64_t left = std::min<int64_t>(W, columns - j * W);
            sum[i][j] = vec<W>{};
            if (add && left > 0) sum[i][j] = load_some<W>(c + i * c_stride + j * W, left);
        }
    for (int64_t step = 0; step < k; ++step) {
        vec<W> right[V];
        for (int j = 0; j < V; ++j) right[j] = load<W>(b + step * b_stride + j * W);
        for (int i = 0; i < R; ++i) {
            const float left = a[at<T>(i, step, stride)];
            for (int j = 0; j < V; ++j) sum[i][j] += left * right[j];
        }
    }
    for (int i = 0; i < R; ++i)
        for (int j = 0; j < V; ++j) {
            const int64_t left = std::min<int64_t>(W, columns - j * W);
            if (left > 0) store_some<W>(c + i * c_stride + j * W, left, sum[i][j]);
        }
}

/* Rows from `i` on by R at a time, as far as they reach. A function and no lambda: that would be compiled for the baseline where it is not
 * inlined, which is slow and without fused additions, so that bits would hang on how many rows there are. */
template <int W, int R, int V, bool T>
INLINE int64_t rows_by(const Product& p, int64_t i, const float* b, int64_t b_stride, int64_t column, int64_t columns) {
    for (; i + R <= p.m; i += R)
        block<W, R, V, T>(p.a + at<T>(i, 0, p.a_stride), p.a_stride, b, b_stride, p.k, p.c + i * p.c_stride + column, p.c_stride, columns,
                          p.add);
    return i;
}

/* All rows against V vectors of one panel. */
template <int W, int V, bool T>
INLINE void stripe(const Product& p, const float* b, int64_t b_stride, int64_t column, int64_t columns) {
    int64_t i = rows_by<W, 6, V, T>(p, 0, b, b_stride, column, columns);
    i = rows_by<W, 2, V, T>(p, i, b, b_stride, column, columns);
    rows_by<W, 1, V, T>(p, i, b, b_stride, column, columns);
}

template <int W, bool T>
INLINE void multiply_as(const Product& p) {
    constexpr int MOST = W == 16 ? 4 : 2; /* 6 x 4 vectors of 32 registers, 6 x 2 of 16 */
    const int64_t b_stride = p.b_stride ? p.b_stride : STRIPE;
    for (int64_t column = p.first, next; column < p.last; column = next) {
        next = std::min(column + MOST * W, column / STRIPE * STRIPE + STRIPE); /* not across two stripes */
        const float* b = p.panels + (p.b_stride ? column : column / STRIPE * STRIPE * p.k + column % STRIPE);
        const int64_t columns = std::min(next, p.last) - column;
        if (MOST > 2 && columns > 3 * W) stripe<W, MOST, T>(p, b, b_stride, column, columns);
        else if (MOST > 2 && columns > 2 * W) stripe<W, MOST / 2 + 1, T>(p, b, b_stride, column, columns);
        else if (columns > W) stripe<W, 2, T>(p, b, b_stride, column, columns);
        else stripe<W, 1, T>(p, b, b_stride, column, columns);
    }
}

template <int W>
INLINE void multiply_body(const Product& p) {
    if (p.transposed) multiply_as<W, true>(p);
    else multiply_as<W, false>(p);
}

DISPATCH(multiply, (const Product& p), (p))

}  // namespace

void gnomon::multiply(const Product& product) { ::multiply(product); }

void gnomon::pack(const float* b, int64_t stride, int64_t k, int64_t n, float* panels) {
    for (int64_t column = 0; column < n; column += STRIPE) {
        const int64_t width = std::min(STRIPE, n - column);
        for (int64_t step = 0; step < k; ++step, panels += STRIPE) {
            std::copy_n(b + step * stride + column, width, panels);
            std::fill(panels + width, panels + STRIPE, 0.0f);
        }
    }
}

void gnomon::pack_transposed(const float* m, int64_t stride, int64_t k, int64_t n, float* panels) {
    for (int64_t column = 0; column < n; column += STRIPE, panels += STRIPE * k) {
        const int64_t width = std::min(STRIPE, n - column), even = width / 4 * 4;
        const float* from = m + column * stride;
        int64_t step = 0;
        for (; step + 4 <= k; step += 4)
            for (int64_t j = 0; j < even; j += 4) transpose_four(from + j * stride + step, stride, panels + step * STRIPE + j, STRIPE);
        for (int64_t j = 0; j < width; ++j)
            for (int64_t s = j < even ? step : 0; s < k; ++s) panels[s * STRIPE + j] = from[j * stride + s];
        for (int64_t s = 0; s < k; ++s) std::fill(panels + s * STRIPE + width, panels + (s + 1) * STRIPE, 0.0f);
    }
}
