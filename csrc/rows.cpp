/* Norms of rows: unit length for queries and keys, root mean square with a weight and, for KDA's output, a sigmoid gate.
 * What each function computes stands in gnomon.h. Rows are independent; the gradient of the weight is summed by blocks of rows, so that
 * the threads change no bit. */
#include <algorithm>
#include <vector>

#include "gnomon.h"
#include "regions.h"
#include "rows.h"

namespace {

constexpr int64_t BLOCK = 256; /* rows of a task */

int64_t blocks_of(int64_t rows) { return (rows + BLOCK - 1) / BLOCK; }

template <class F>
void by_blocks(int threads, int64_t rows, F&& row) {
    each_task(threads, blocks_of(rows), [&](int64_t block, int) {
        for (int64_t r = block * BLOCK; r < std::min(rows, (block + 1) * BLOCK); ++r) row(r);
    });
}

/* y = a x + b z */
template <int W>
INLINE void combine(float a, const float* x, float b, const float* z, int64_t n, float* y) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store<W>(y + i, a * load<W>(x + i) + b * load<W>(z + i));
    for (; i < n; ++i) y[i] = a * x[i] + b * z[i];
}

template <int W>
INLINE void unit_row_body(const float* x, const float* d_y, int64_t n, float eps, float scale, float* out) {
    const float inverse = 1.0f / std::sqrt(dot<W>(x, x, n) + eps);
    if (d_y) combine<W>(scale * inverse, d_y, -scale * inverse * inverse * inverse * dot<W>(x, d_y, n), x, n, out);
    else combine<W>(scale * inverse, x, 0.0f, x, n, out);
}
DISPATCH(unit_row, (const float* x, const float* d_y, int64_t n, float eps, float scale, float* out), (x, d_y, n, eps, scale, out))

DISPATCH(rms_row, (const float* x, const float* weight, const float* gate, int64_t n, float eps, float* y), (x, weight, gate, n, eps, y))

struct RmsGradients {
    const float *x, *weight, *gate, *d_y;
    float *d_x, *d_weight, *d_gate; /* d_weight is added to, the others are written */
};

/* With n = x r: d_n = d_y w s, d_x = r (d_n - n mean(d_n n)), d_w += d_y n s, d_gate = d_y n w s (1 - s). d_x holds d_n in between. */
template <int W>
INLINE void rms_row_back_body(const RmsGradients& a, int64_t n, float eps) {
    const float inverse = 1.0f / std::sqrt(dot<W>(a.x, a.x, n) / n + eps);
    const vec<W> one = vec<W>{} + 1.0f;
    vec<W> total = {};
    for (int64_t i = 0; i < n; i += W) {
        const int64_t width = n - i < W ? n - i : W;
        const vec<W> normal = load_some<W>(a.x + i, width) * inverse, weight = load_some<W>(a.weight + i, width);
        vec<W> d_y = load_some<W>(a.d_y + i, width);
        if (a.gate) {
            const vec<W> s = sigmoid<W>(load_some<W>(a.gate + i, width));
            d_y *= s;
            store_some<W>(a.d_gate + i, width, d_y * normal * weight * (one - s));
        }
        store_some<W>(a.d_weight + i, width, load_some<W>(a.d_weight + i, width) + d_y * normal);
        const vec<W> d_normal = d_y * weight;
        total += d_normal * normal;
        store_some<W>(a.d_x + i, width, d_normal);
    }
    combine<W>(inverse, a.d_x, -inverse * inverse * sum<W>(total) / n, a.x, n, a.d_x);
}
DISPATCH(rms_row_back, (const RmsGradients& a, int64_t n, float eps), (a, n, eps))

}  // namespace

extern "C" void gnomon_unit_forward(const float* x, int64_t rows, int64_t width, float eps, float scale, float* y, int32_t threads) {
    by_blocks(threads, rows, [&](int64_t r) { unit_row(x + r * width, nullptr, width, eps, scale, y + r * width); });
}

extern "C" void gnomon_unit_backward(const float* x, const float* d_y, int64_t rows, int64_t width, float eps, float scale, float* d_x,
                                     int32_t threads) {
    by_blocks(threads, rows, [&](int64_t r) { unit_row(x + r * width, d_y + r * width, width, eps, scale, d_x + r * width); });
}

extern "C" void gnomon_rms_forward(const float* x, const float* weight, const float* gate, int64_t rows, int64_t width, float eps, float* y,
                                   int32_t threads) {
    by_blocks(threads, rows,
              [&](int64_t r) { rms_row(x + r * width, weight, gate ? gate + r * width : nullptr, width, eps, y + r * width); });
}

extern "C" void gnomon_rms_backward(const float* x, const float* weight, const float* gate, const float* d_y, int64_t rows, int64_t width,
                                    float eps, float* d_x, float* d_weight, float* d_gate, int32_t threads) {
    std::vector<float> partial(blocks_of(rows) * width, 0.0f);
    by_blocks(threads, rows, [&](int64_t r) {
        const int64_t at = r * width;
        float* mine = partial.data() + r / BLOCK * width;
        rms_row_back({x + at, weight, gate ? gate + at : nullptr, d_y + at, d_x + at, mine, gate ? d_gate + at : nullptr}, width, eps);
    });
    std::fill(d_weight, d_weight + width, 0.0f);
    for (int64_t b = 0; b < blocks_of(rows); ++b)
        for (int64_t i = 0; i < width; ++i) d_weight[i] += partial[b * width + i];
}
