/* SiTU-GLU (report section 2.3.2) for CPUs: one pass over the inputs, forward and backward. What each function computes stands in gnomon.h.
 *
 * The backward pass recomputes both tanh and the sigmoid from the inputs: an exponential in registers costs less than keeping
 * three more activations in memory. It also does what lies between two products of a routed expert (scaling by the routing weight,
 * the inner product that is the weight's gradient), because the operands are in registers there.
 */
#include <algorithm>

#include "gnomon.h"
#include "lanes.h"

namespace {

/* tanh to about two units in the last place: a polynomial near zero, where 1 - 2/(e^2x + 1) would cancel. */
template <int W>
INLINE vec<W> hyperbolic_tangent(vec<W> x) {
    const vec<W> zero = {}, size = x < zero ? -x : x, square = x * x;
    vec<W> p = zero - 5.70498872745e-3f;
    p = p * square + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    const vec<W> near = p * square * x + x;
    const vec<W> far = 1.0f - 2.0f / (exponential<W>(2.0f * size) + 1.0f);
    return size >= 0.625f ? (x < zero ? -far : far) : near; /* NaN takes the polynomial and stays NaN */
}

/* A cap of zero means none. The derivative is that of the capped value. */
template <int W>
INLINE vec<W> capped(vec<W> x, float beta, vec<W>* derivative) {
    const vec<W> zero = {};
    if (beta == 0.0f) {
        *derivative = zero + 1.0f;
        return x;
    }
    const vec<W> t = hyperbolic_tangent<W>(x / beta);
    *derivative = 1.0f - t * t;
    return beta * t;
}

struct Tile {
    const float *grad, *gate, *up, *weight;
    float *out, *d_gate, *d_up, *weighted, *d_weight;
    int64_t rows, width;
    float beta1, beta2;
};

template <int W>
INLINE void forward_body(const Tile& t) {
    const int64_t count = t.rows * t.width;
    for (int64_t i = 0; i < count; i += W) {
        const int64_t left = std::min<int64_t>(W, count - i);
        vec<W> unused;
        const vec<W> g = load_some<W>(t.gate + i, left), u = load_some<W>(t.up + i, left);
        const vec<W> s = 1.0f / (1.0f + exponential<W>(-g));
        store_some<W>(t.out + i, left, capped<W>(g, t.beta1, &unused) * s * capped<W>(u, t.beta2, &unused));
    }
}

template <int W>
INLINE void backward_body(const Tile& t) {
    for (int64_t row = 0; row < t.rows; ++row) {
        const float weight = t.weight ? t.weight[row] : 1.0f;
        vec<W> inner = {};
        for (int64_t i = row * t.width; i < (row + 1) * t.width; i += W) {
            const int64_t left = std::min<int64_t>(W, (row + 1) * t.width - i);
            vec<W> by_gate, by_up;
            const vec<W> g = load_some<W>(t.gate + i, left), u = load_some<W>(t.up + i, left), d = load_some<W>(t.grad + i, left);
            const vec<W> s = 1.0f / (1.0f + exponential<W>(-g));
            const vec<W> cap = capped<W>(g, t.beta1, &by_gate), linear = capped<W>(u, t.beta2, &by_up);
            const vec<W> a = cap * s * linear, scaled = d * weight;
            inner += d * a;
            store_some<W>(t.d_gate + i, left, scaled * linear * s * (by_gate + cap * (1.0f - s)));
            store_some<W>(t.d_up + i, left, scaled * cap * s * by_up);
            if (t.weighted) store_some<W>(t.weighted + i, left, a * weight);
        }
        if (t.d_weight) t.d_weight[row] = sum<W>(inner);
    }
}

DISPATCH(forward, (const Tile& t), (t))
DISPATCH(backward, (const Tile& t), (t))

const int64_t TILE = 1 << 14; /* elements of one task: large against the cost of handing it out */

int64_t rows_per_task(int64_t width) { return std::max<int64_t>(1, TILE / std::max<int64_t>(1, width)); }

}  // namespace

extern "C" void gnomon_situ_forward(const float* gate, const float* up, int64_t rows, int64_t width, float beta1, float beta2, float* out,
                                    int32_t threads) {
    const int64_t step = rows_per_task(width);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row += step) {
        const int64_t at = row * width;
        forward({nullptr, gate + at, up + at, nullptr, out + at, nullptr, nullptr, nullptr, nullptr, std::min(step, rows - row), width,
                 beta1, beta2});
    }
}

extern "C" void gnomon_situ_backward(const float* grad, const float* gate, const float* up, const float* weight, int64_t rows, int64_t width,
                                     float beta1, float beta2, float* d_gate, float* d_up, float* weighted, float* d_weight,
                                     int32_t threads) {
    const int64_t step = rows_per_task(width);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row += step) {
        const int64_t at = row * width;
        backward({grad + at, gate + at, up + at, weight ? weight + row : nullptr, nullptr, d_gate + at, d_up + at,
                  weighted ? weighted + at : nullptr, d_weight ? d_weight + row : nullptr, std::min(step, rows - row), width, beta1, beta2});
    }
}
