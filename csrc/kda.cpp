/* Kimi Delta Attention (report section 2.1.1) for CPUs. What each function computes stands in gnomon.h.
 *
 * Forward: the columns of the state are independent, so a task owns one document, one head and a few vectors of columns, keeps
 * its slice of the state in the first-level cache and walks the tokens. Adding the last token's outer product, decaying, and both
 * inner products share one pass over the slice. In fp32 on a CPU that needs fewer operations than the chunkwise form, whose
 * point is matrix units, and has no large exponents to guard.
 * Backward: a task owns one document and head. From the last period to the first it replays the states of four columns from the
 * state that the forward pass kept, then walks the tokens in reverse. Here the key channels lie along the vectors.
 */
#include <algorithm>
#include <cmath>
#include <vector>

#include "gnomon.h"
#include "lanes.h"

namespace {

struct Shape {
    const int64_t* bounds;
    int64_t documents, heads, keys, values, period;
};

int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

template <int W>
INLINE void exponentials(const float* x, int64_t n, float* y) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store<W>(y + i, exponential<W>(load<W>(x + i)));
    for (; i < n; ++i) y[i] = x[i] < -87.0f ? 0.0f : std::exp(x[i]);
}

/* Columns [column, column + width) of a row of values, zero beyond its end. */
template <int W, int NV>
INLINE void load_columns(const float* row, int64_t width, vec<W>* x) {
    if (width == W * NV) {
        for (int j = 0; j < NV; ++j) x[j] = load<W>(row + j * W);
    } else {
        float padded[W * NV] = {};
        std::copy_n(row, width, padded);
        for (int j = 0; j < NV; ++j) x[j] = load<W>(padded + j * W);
    }
}

template <int W, int NV>
INLINE void store_columns(float* row, int64_t width, const vec<W>* x) {
    if (width == W * NV) {
        for (int j = 0; j < NV; ++j) store<W>(row + j * W, x[j]);
    } else {
        float padded[W * NV];
        for (int j = 0; j < NV; ++j) store<W>(padded + j * W, x[j]);
        std::copy_n(padded, width, row);
    }
}

struct ForwardTask {
    const float *q, *k, *v, *g, *beta, *initial; /* at the head's first channel of the document's first token; initial at [0, column] */
    float *o, *last, *error, *states;
    int64_t length, heads, keys, values, period, column;
    float* scratch; /* keys * columns of the state, then keys decays */
};

/* The state slice with the pending outer product added, as rows of [K, V]. */
template <int W, int NV>
INLINE void write_state(const float* slice, const float* k_before, const vec<W>* u, int64_t keys, int64_t values, int64_t width, float* out) {
    for (int64_t c = 0; c < keys; ++c) {
        vec<W> row[NV];
        const float kb = k_before ? k_before[c] : 0.0f;
        for (int j = 0; j < NV; ++j) row[j] = load<W>(slice + (c * NV + j) * W) + kb * u[j];
        store_columns<W, NV>(out + c * values, width, row);
    }
}

template <int W, int NV>
INLINE void forward_columns(const ForwardTask& a) {
    const int64_t keys = a.keys, width = std::min<int64_t>(W * NV, a.values - a.column);
    float *slice = a.scratch, *decay = a.scratch + keys * W * NV;
    vec<W> u[NV] = {};
    for (int64_t c = 0; c < keys; ++c) {
        vec<W> row[NV] = {};
        if (a.initial) load_columns<W, NV>(a.initial + c * a.values + a.column, width, row);
        for (int j = 0; j < NV; ++j) store<W>(slice + (c * NV + j) * W, row[j]);
    }
    for (int64_t t = 0; t < a.length; ++t) {
        const float *q = a.q + t * a.heads * keys, *k = a.k + t * a.heads * keys;
        const float* before = t ? k - a.heads * keys : k; /* u is zero at t = 0 */
        if (a.states && t % a.period == 0)
            write_state<W, NV>(slice, before, u, keys, a.values, width, a.states + t / a.period * a.heads * keys * a.values + a.column);
        exponentials<W>(a.g + t * a.heads * keys, keys, decay);
        vec<W> kept[NV] = {}, read[NV] = {}, value[NV];
        float kq = 0.0f;
        for (int64_t c = 0; c < keys; ++c) {
            const float kb = before[c], kc = k[c], qc = q[c], d = decay[c];
            float* row = slice + c * NV * W;
            kq += kc * qc;
            for (int j = 0; j < NV; ++j) {
                const vec<W> s = (load<W>(row + j * W) + kb * u[j]) * d;
                store<W>(row + j * W, s);
                kept[j] += kc * s;
                read[j] += qc * s;
            }
        }
        load_columns<W, NV>(a.v + t * a.heads * a.values + a.column, width, value);
        const float beta = a.beta[t * a.heads];
        for (int j = 0; j < NV; ++j) {
            value[j] -= kept[j]; /* e */
            u[j] = beta * value[j];
            read[j] += kq * u[j];
        }
        store_columns<W, NV>(a.o + t * a.heads * a.values + a.column, width, read);
        if (a.error) store_columns<W, NV>(a.error + t * a.heads * a.values + a.column, width, value);
    }
    const float* before = a.length ? a.k + (a.length - 1) * a.heads * keys : nullptr;
    write_state<W, NV>(slice, before, u, keys, a.values, width, a.last + a.column);
}

template <int W>
INLINE void forward_body(const ForwardTask& a, int vectors) {
    if (vectors == 4) forward_columns<W, 4>(a);
    else if (vectors == 2) forward_columns<W, 2>(a);
    else forward_columns<W, 1>(a);
}
DISPATCH(forward, (const ForwardTask& a, int vectors), (a, vectors))

constexpr int ROWS = 4; /* columns of the state that the backward pass carries together */

struct BackwardTask {
    const float *q, *k, *g, *beta, *error, *states, *d_o, *d_last;
    float *d_q, *d_k, *d_v, *d_g, *d_beta, *d_initial;
    int64_t length, heads, keys, values, period;
    float* scratch; /* 7 + ROWS arrays of period * padded keys, then values * padded keys */
};

/* The arrays of one period, key channels padded to a multiple of W with zeros. */
struct Period {
    float *q, *k, *decay, *d_q, *d_k, *d_g, *history; /* [tokens, padded]; history [tokens, ROWS, padded] */
    int64_t tokens, padded;
};

/* What one token of ROWS columns carries: error e, u = beta e, gradient of o. */
struct Columns {
    float e[ROWS], u[ROWS], d_o[ROWS];
};

/* The decayed states of ROWS columns before each token's own update, replayed from the state at the period's start. */
template <int W>
INLINE void replay(const Period& p, const Columns* tokens, const float* start, int64_t keys, int64_t values, int rows) {
    alignas(64) float padded[ROWS * W];
    for (int64_t c = 0; c < p.padded; c += W) {
        for (int r = 0; r < ROWS; ++r)
            for (int i = 0; i < W; ++i) padded[r * W + i] = c + i < keys && r < rows ? start[(c + i) * values + r] : 0.0f;
        vec<W> s[ROWS];
        for (int r = 0; r < ROWS; ++r) s[r] = load<W>(padded + r * W);
        for (int64_t t = 0; t < p.tokens; ++t) {
            const vec<W> d = load<W>(p.decay + t * p.padded + c), k = load<W>(p.k + t * p.padded + c);
            for (int r = 0; r < ROWS; ++r) {
                s[r] *= d;
                store<W>(p.history + (t * ROWS + r) * p.padded + c, s[r]);
                s[r] += k * tokens[t].u[r];
            }
        }
    }
}

/* One token backwards for ROWS columns; `ds` [ROWS, padded] is the gradient of the state after it, then before it. */
template <int W>
INLINE void reverse_token(const Period& p, int64_t t, const Columns& x, float beta, float* ds, float* d_value, float* d_beta) {
    const int64_t at = t * p.padded;
    vec<W> sums[ROWS] = {};
    float written = 0.0f; /* u . d_o: what q takes from this token's own key */
    for (int r = 0; r < ROWS; ++r) written += x.u[r] * x.d_o[r];
    for (int64_t c = 0; c < p.padded; c += W) {
        const vec<W> q = load<W>(p.q + at + c), k = load<W>(p.k + at + c);
        vec<W> dq = load<W>(p.d_q + at + c) + k * written;
        for (int r = 0; r < ROWS; ++r) {
            const vec<W> d = load<W>(ds + r * p.padded + c) + q * x.d_o[r];
            store<W>(ds + r * p.padded + c, d);
            dq += load<W>(p.history + (t * ROWS + r) * p.padded + c) * x.d_o[r];
            sums[r] += d * k;
        }
        store<W>(p.d_q + at + c, dq);
    }
    float de[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        const float du = sum<W>(sums[r]);
        de[r] = beta * du;
        *d_beta += du * x.e[r];
        d_value[r] = de[r];
    }
    for (int64_t c = 0; c < p.padded; c += W) {
        const vec<W> k = load<W>(p.k + at + c), decay = load<W>(p.decay + at + c);
        vec<W> dk = load<W>(p.d_k + at + c), dg = load<W>(p.d_g + at + c);
        for (int r = 0; r < ROWS; ++r) {
            const vec<W> s = load<W>(p.history + (t * ROWS + r) * p.padded + c);
            vec<W> d = load<W>(ds + r * p.padded + c);
            dk += d * x.u[r] - s * de[r];
            d -= k * de[r];
            dg += d * s;
            store<W>(ds + r * p.padded + c, d * decay);
        }
        store<W>(p.d_k + at + c, dk);
        store<W>(p.d_g + at + c, dg);
    }
}

template <int W>
INLINE void backward_body(const BackwardTask& a) {
    const int64_t K = a.keys, V = a.values, padded = round_up(K, W), strideK = a.heads * K, strideV = a.heads * V;
    const int64_t block = a.period * padded;
    Period p{a.scratch, a.scratch + block, a.scratch + 2 * block, a.scratch + 3 * block, a.scratch + 4 * block, a.scratch + 5 * block,
             a.scratch + 6 * block, 0, padded};
    float* ds = a.scratch + (6 + ROWS) * block; /* [V rounded up to ROWS, padded] */
    std::vector<Columns> tokens(a.period);
    for (int64_t v = 0; v < round_up(V, ROWS); ++v)
        for (int64_t c = 0; c < padded; ++c) ds[v * padded + c] = a.d_last && v < V && c < K ? a.d_last[c * V + v] : 0.0f;

    for (int64_t chunk = (a.length + a.period - 1) / a.period - 1; chunk >= 0; --chunk) {
        const int64_t first = chunk * a.period;
        p.tokens = std::min(a.period, a.length - first);
        std::fill(p.q, p.q + 6 * block, 0.0f);
        for (int64_t t = 0; t < p.tokens; ++t) {
            std::copy_n(a.q + (first + t) * strideK, K, p.q + t * padded);
            std::copy_n(a.k + (first + t) * strideK, K, p.k + t * padded);
            exponentials<W>(a.g + (first + t) * strideK, K, p.decay + t * padded);
            a.d_beta[(first + t) * a.heads] = 0.0f;
        }
        for (int64_t v = 0; v < V; v += ROWS) {
            const int rows = static_cast<int>(std::min<int64_t>(ROWS, V - v));
            for (int64_t t = 0; t < p.tokens; ++t)
                for (int r = 0; r < ROWS; ++r) {
                    const int64_t at = (first + t) * strideV + v + r;
                    tokens[t].e[r] = r < rows ? a.error[at] : 0.0f;
                    tokens[t].u[r] = a.beta[(first + t) * a.heads] * tokens[t].e[r];
                    tokens[t].d_o[r] = r < rows ? a.d_o[at] : 0.0f;
                }
            replay<W>(p, tokens.data(), a.states + chunk * a.heads * K * V + v, K, V, rows);
            for (int64_t t = p.tokens - 1; t >= 0; --t) {
                float d_value[ROWS];
                const int64_t at = (first + t) * a.heads;
                reverse_token<W>(p, t, tokens[t], a.beta[at], ds + v * padded, d_value, a.d_beta + at);
                std::copy_n(d_value, rows, a.d_v + (first + t) * strideV + v);
            }
        }
        for (int64_t t = 0; t < p.tokens; ++t) {
            std::copy_n(p.d_q + t * padded, K, a.d_q + (first + t) * strideK);
            std::copy_n(p.d_k + t * padded, K, a.d_k + (first + t) * strideK);
            std::copy_n(p.d_g + t * padded, K, a.d_g + (first + t) * strideK);
        }
    }
    for (int64_t c = 0; c < K; ++c)
        for (int64_t v = 0; v < V; ++v) a.d_initial[c * V + v] = ds[v * padded + c];
}
DISPATCH(backward, (const BackwardTask& a), (a))

/* Vectors of columns per task, for W lanes. */
int columns_of(int lanes, int64_t values) { return values > 2 * lanes ? 4 : values > lanes ? 2 : 1; }

int lanes() {
    const int set = instruction_set();
    return set == 4 ? 16 : set == 3 ? 8 : 4;
}

/* The first period of each document among all periods. */
std::vector<int64_t> first_periods(const Shape& s) {
    std::vector<int64_t> first(s.documents + 1, 0);
    for (int64_t d = 0; d < s.documents; ++d) first[d + 1] = first[d] + (s.bounds[d + 1] - s.bounds[d] + s.period - 1) / s.period;
    return first;
}

}  // namespace

extern "C" void gnomon_kda_forward(const float* q, const float* k, const float* v, const float* g, const float* beta, const float* initial,
                                   const int64_t* bounds, int64_t documents, int64_t heads, int64_t keys, int64_t values, int64_t period,
                                   float* o, float* last, float* error, float* states, int32_t threads) {
    const Shape shape{bounds, documents, heads, keys, values, period};
    const std::vector<int64_t> first = first_periods(shape);
    const int width = lanes(), vectors = columns_of(width, values), columns = width * vectors;
    const int64_t slices = (values + columns - 1) / columns, tasks = documents * heads * slices;
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> scratch(keys * (columns + 1) + width);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; ++task) {
            const int64_t d = task / (heads * slices), h = task / slices % heads, column = task % slices * columns;
            const int64_t token = bounds[d] * heads + h, state = (d * heads + h) * keys * values;
            forward({q + token * keys, k + token * keys, v + token * values, g + token * keys, beta + token,
                     initial ? initial + state : nullptr, o + token * values, last + state, error ? error + token * values : nullptr,
                     states ? states + (first[d] * heads + h) * keys * values : nullptr, bounds[d + 1] - bounds[d], heads, keys, values,
                     period, column, scratch.data()},
                    vectors);
        }
    }
}

extern "C" void gnomon_kda_backward(const float* q, const float* k, const float* g, const float* beta, const float* error,
                                    const float* states, const float* d_o, const float* d_last, const int64_t* bounds, int64_t documents,
                                    int64_t heads, int64_t keys, int64_t values, int64_t period, float* d_q, float* d_k, float* d_v,
                                    float* d_g, float* d_beta, float* d_initial, int32_t threads) {
    const Shape shape{bounds, documents, heads, keys, values, period};
    const std::vector<int64_t> first = first_periods(shape);
    const int64_t padded = round_up(keys, lanes());
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> scratch((6 + ROWS) * period * padded + round_up(values, ROWS) * padded);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < documents * heads; ++task) {
            const int64_t d = task / heads, h = task % heads, token = bounds[d] * heads + h, state = task * keys * values;
            backward({q + token * keys, k + token * keys, g + token * keys, beta + token, error + token * values,
                      states + (first[d] * heads + h) * keys * values, d_o + token * values, d_last ? d_last + state : nullptr,
                      d_q + token * keys, d_k + token * keys, d_v + token * values, d_g + token * keys, d_beta + token,
                      d_initial + state, bounds[d + 1] - bounds[d], heads, keys, values, period, scratch.data()});
        }
    }
}

extern "C" void gnomon_kda_step(const float* q, const float* k, const float* v, const float* g, const float* beta, const float* state,
                                int64_t rows, int64_t keys, int64_t values, float* o, float* next, int32_t threads) {
    std::vector<int64_t> bounds(rows + 1);
    for (int64_t r = 0; r <= rows; ++r) bounds[r] = r;
    gnomon_kda_forward(q, k, v, g, beta, state, bounds.data(), rows, 1, keys, values, 1, o, next, nullptr, nullptr, threads);
}
