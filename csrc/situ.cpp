/* SiTU-GLU (report section 2.3.2) for CPUs: one pass over the inputs, forward and backward. What each function computes stands in gnomon.h.
 *
 * The backward pass recomputes both tanh and the sigmoid from the inputs: an exponential in registers costs less than keeping
 * three more activations in memory. It also does what lies between two products of a routed expert (scaling by the routing weight,
 * the inner product that is the weight's gradient), because the operands are in registers there.
 *
 * tanh is a polynomial near zero and an exponential elsewhere. Values go through in spans; where a whole span is near zero, which it
 * mostly is, the exponential is not computed. A lane takes the branch of its own value either way, so its result does not depend on that.
 */
#include "situ.h"

#include <algorithm>

#include "gnomon.h"
#include "lanes.h"

namespace {

using gnomon::SituGradient;

const float NEAR = 0.625f; /* where the polynomial ends */
const int64_t SPAN = 128;  /* values that are looked at together */

template <int W>
INLINE vec<W> magnitude(vec<W> x) {
    const vec<W> zero = {};
    return x < zero ? -x : x;
}

/* tanh to about two units in the last place: a polynomial near zero, where 1 - 2/(e^2x + 1) would cancel. */
template <int W, bool FAR>
INLINE vec<W> hyperbolic_tangent(vec<W> x) {
    const vec<W> zero = {}, square = x * x;
    vec<W> p = zero - 5.70498872745e-3f;
    p = p * square + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    const vec<W> near = p * square * x + x;
    if (!FAR) return near;
    const vec<W> size = magnitude<W>(x);
    const vec<W> far = 1.0f - 2.0f / (exponential<W>(2.0f * size) + 1.0f);
    return size >= NEAR ? (x < zero ? -far : far) : near; /* NaN takes the polynomial and stays NaN */
}

/* One branch: its cap (zero means none) and the reciprocal. */
struct Cap {
    float beta, inverse;
    explicit Cap(float beta) : beta(beta), inverse(beta == 0.0f ? 0.0f : 1.0f / beta) {}
};

/* The capped value; the derivative is that of the cap. */
template <int W, bool FAR>
INLINE vec<W> capped(vec<W> x, Cap cap, vec<W>* derivative) {
    const vec<W> zero = {};
    if (cap.beta == 0.0f) {
        *derivative = zero + 1.0f;
        return x;
    }
    const vec<W> t = hyperbolic_tangent<W, FAR>(x * cap.inverse);
    *derivative = 1.0f - t * t;
    return cap.beta * t;
}

/* Whether any of the values leaves the polynomial. */
template <int W>
INLINE bool reaches_far(const float* x, int64_t count, Cap cap) {
    if (cap.beta == 0.0f) return false;
    vec<W> most = {};
    for (int64_t i = 0; i < count; i += W) {
        const vec<W> size = magnitude<W>(load_some<W>(x + i, std::min<int64_t>(W, count - i)) * cap.inverse);
        most = size > most ? size : most;
    }
    float largest = 0.0f;
    for (int j = 0; j < W; ++j) largest = std::max(largest, most[j]);
    return largest >= NEAR;
}

struct Forward {
    const float *gate, *up;
    float* out;
    int64_t count;
    Cap first, second;
};

template <int W, bool FAR>
INLINE void forward_span(const Forward& f, int64_t start, int64_t stop) {
    for (int64_t i = start; i < stop; i += W) {
        const int64_t left = std::min<int64_t>(W, stop - i);
        vec<W> unused;
        const vec<W> g = load_some<W>(f.gate + i, left), u = load_some<W>(f.up + i, left);
        const vec<W> s = sigmoid<W>(g);
        store_some<W>(f.out + i, left, capped<W, FAR>(g, f.first, &unused) * s * capped<W, FAR>(u, f.second, &unused));
    }
}

template <int W>
INLINE void forward_body(const Forward& f) {
    for (int64_t start = 0; start < f.count; start += SPAN) {
        const int64_t stop = std::min(start + SPAN, f.count), count = stop - start;
        if (reaches_far<W>(f.gate + start, count, f.first) || reaches_far<W>(f.up + start, count, f.second))
            forward_span<W, true>(f, start, stop);
        else forward_span<W, false>(f, start, stop);
    }
}

template <int W, bool FAR>
INLINE void backward_span(const SituGradient& t, Cap first, Cap second, float weight, int64_t start, int64_t stop, vec<W>* inner) {
    for (int64_t i = start; i < stop; i += W) {
        const int64_t left = std::min<int64_t>(W, stop - i);
        vec<W> by_gate, by_up;
        const vec<W> g = load_some<W>(t.gate + i, left), u = load_some<W>(t.up + i, left), d = load_some<W>(t.grad + i, left);
        const vec<W> s = sigmoid<W>(g);
        const vec<W> cap = capped<W, FAR>(g, first, &by_gate), linear = capped<W, FAR>(u, second, &by_up);
        const vec<W> a = cap * s * linear, scaled = d * weight;
        *inner += d * a;
        store_some<W>(t.d_gate + i, left, scaled * linear * s * (by_gate + cap * (1.0f - s)));
        store_some<W>(t.d_up + i, left, scaled * cap * s * by_up);
        if (t.weighted) store_some<W>(t.weighted + i, left, a * weight);
    }
}

template <int W>
INLINE void backward_body(const SituGradient& t) {
    const Cap first(t.beta1), second(t.beta2);
    for (int64_t row = 0; row < t.rows; ++row) {
        const float weight = t.weight ? t.weight[row] : 1.0f;
        const int64_t end = (row + 1) * t.width;
        vec<W> inner = {};
        for (int64_t start = row * t.width; start < end; start += SPAN) {
            const int64_t stop = std::min(start + SPAN, end), count = stop - start;
            if (reaches_far<W>(t.gate + start, count, first) || reaches_far<W>(t.up + start, count, second))
                backward_span<W, true>(t, first, second, weight, start, stop, &inner);
            else backward_span<W, false>(t, first, second, weight, start, stop, &inner);
        }
        if (t.d_weight) t.d_weight[row] = sum<W>(inner);
    }
}

DISPATCH(forward, (const Forward& f), (f))
DISPATCH(backward, (const SituGradient& t), (t))

const int64_t TILE = 1 << 14; /* elements of one task: large against the cost of handing it out */

int64_t rows_per_task(int64_t width) { return std::max<int64_t>(1, TILE / std::max<int64_t>(1, width)); }

}  // namespace

void gnomon::situ(const float* gate, const float* up, int64_t count, float beta1, float beta2, float* out) {
    forward({gate, up, out, count, Cap(beta1), Cap(beta2)});
}

void gnomon::situ_backward(const SituGradient& gradient) { backward(gradient); }

extern "C" void gnomon_situ_forward(const float* gate, const float* up, int64_t rows, int64_t width, float beta1, float beta2, float* out,
                                    int32_t threads) {
    const int64_t step = rows_per_task(width);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row += step) {
        const int64_t at = row * width;
        gnomon::situ(gate + at, up + at, std::min(step, rows - row) * width, beta1, beta2, out + at);
    }
}

extern "C" void gnomon_situ_backward(const float* grad, const float* gate, const float* up, const float* weight, int64_t rows,
                                     int64_t width, float beta1, float beta2, float* d_gate, float* d_up, float* weighted, float* d_weight,
                                     int32_t threads) {
    const int64_t step = rows_per_task(width);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row += step) {
        const int64_t at = row * width;
        backward({grad + at, gate + at, up + at, weight ? weight + row : nullptr, d_gate + at, d_up + at, 
                  weighted ? weighted + at : nullptr, d_weight ? d_weight + row : nullptr, std::min(step, rows - row), width, beta1,
                  beta2});
    }
}
