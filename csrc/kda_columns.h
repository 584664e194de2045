/* The recurrence of Kimi Delta Attention over a few columns of the state, which are independent of all other columns.
 *
 * A slice holds NV vectors of columns for every key channel, [keys, NV * W]. Adding the last token's outer product, decaying, and
 * both inner products share one pass over it. Each number depends on its column alone: how many columns go together, and where a
 * stretch of tokens is cut, changes no bit. */
#pragma once

#include <algorithm>
#include <cstdint>

#include "lanes.h"

/* The first `width` of W * NV columns of a row, zero beyond; and writing only those. */
template <int W, int NV>
INLINE void load_columns(const float* row, int64_t width, vec<W>* x) {
    if (width == W * NV) {
        for (int j = 0; j < NV; ++j) x[j] = load<W>(row + j * W);
        return;
    }
    for (int j = 0; j < NV; ++j) {
        const int64_t here = width - j * W;
        x[j] = here >= W ? load<W>(row + j * W) : here > 0 ? load_some<W>(row + j * W, here) : vec<W>{};
    }
}

template <int W, int NV>
INLINE void store_columns(float* row, int64_t width, const vec<W>* x) {
    if (width == W * NV) {
        for (int j = 0; j < NV; ++j) store<W>(row + j * W, x[j]);
        return;
    }
    for (int j = 0; j < NV; ++j) {
        const int64_t here = width - j * W;
        if (here > 0) store_some<W>(row + j * W, here >= W ? W : here, x[j]);
    }
}

/* Between a slice and the columns of a state [keys, values] that begin at `state`. */
template <int W, int NV>
INLINE void load_slice(const float* state, int64_t keys, int64_t values, int64_t width, float* slice) {
    for (int64_t c = 0; c < keys; ++c) {
        vec<W> row[NV] = {};
        if (state) load_columns<W, NV>(state + c * values, width, row);
        for (int j = 0; j < NV; ++j) store<W>(slice + (c * NV + j) * W, row[j]);
    }
}

template <int W, int NV>
INLINE void store_slice(const float* slice, int64_t keys, int64_t values, int64_t width, float* state) {
    for (int64_t c = 0; c < keys; ++c) {
        vec<W> row[NV];
        for (int j = 0; j < NV; ++j) row[j] = load<W>(slice + (c * NV + j) * W);
        store_columns<W, NV>(state + c * values, width, row);
    }
}

/* A few tokens of one head, at the first of them: decay = exp(g); v, o and error (or NULL) at the slice's first column. */
struct Tokens {
    const float *q, *k, *decay;
    int64_t qk_stride, decay_stride;
    const float* v;
    int64_t v_stride;
    const float* beta;
    int64_t beta_stride;
    float *o, *error;
    int64_t o_stride, count;
};

/* Walks the tokens; the slice is the state before the first and then after the last. `width` columns of it are real. */
template <int W, int NV>
INLINE void walk_columns(const Tokens& x, int64_t keys, int64_t width, float* slice) {
    vec<W> u[NV] = {};
    for (int64_t t = 0; t < x.count; ++t) {
        const float *q = x.q + t * x.qk_stride, *k = x.k + t * x.qk_stride, *decay = x.decay + t * x.decay_stride;
        const float* before = t ? k - x.qk_stride : k; /* u is zero at the first */
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
        load_columns<W, NV>(x.v + t * x.v_stride, width, value);
        const float beta = x.beta[t * x.beta_stride];
        for (int j = 0; j < NV; ++j) {
            value[j] -= kept[j]; /* e */
            u[j] = beta * value[j];
            read[j] += kq * u[j];
        }
        store_columns<W, NV>(x.o + t * x.o_stride, width, read);
        if (x.error) store_columns<W, NV>(x.error + t * x.o_stride, width, value);
    }
    if (!x.count) return;
    const float* last = x.k + (x.count - 1) * x.qk_stride;
    for (int64_t c = 0; c < keys; ++c)
        for (int j = 0; j < NV; ++j) {
            float* at = slice + (c * NV + j) * W;
            store<W>(at, load<W>(at) + last[c] * u[j]);
        }
}

/* One token on columns of a state [keys, values] where they stand: the bits of load, walk and store, in two passes instead of five.
 * The state is written only with `commit`; `slice` is scratch. */
template <int W, int NV>
INLINE void step_columns(const Tokens& x, int64_t keys, int64_t values, int64_t width, float* state, bool commit, float* slice) {
    constexpr int64_t AHEAD = 12; /* rows; the whole state comes from memory once */
    vec<W> kept[NV] = {}, read[NV] = {}, value[NV], u[NV];
    float kq = 0.0f;
    for (int64_t c = 0; c < keys; ++c) {
        const float kc = x.k[c], qc = x.q[c], d = x.decay[c];
        vec<W> row[NV];
        for (int j = 0; j < NV; ++j) __builtin_prefetch(state + (c + AHEAD) * values + j * W);
        load_columns<W, NV>(state + c * values, width, row);
        kq += kc * qc;
        for (int j = 0; j < NV; ++j) {
            const vec<W> s = row[j] * d;
            store<W>(slice + (c * NV + j) * W, s);
            kept[j] += kc * s;
            read[j] += qc * s;
        }
    }
    load_columns<W, NV>(x.v, width, value);
    for (int j = 0; j < NV; ++j) {
        u[j] = x.beta[0] * (value[j] - kept[j]);
        read[j] += kq * u[j];
    }
    store_columns<W, NV>(x.o, width, read);
    for (int64_t c = 0; commit && c < keys; ++c) {
        vec<W> row[NV];
        for (int j = 0; j < NV; ++j) row[j] = load<W>(slice + (c * NV + j) * W) + x.k[c] * u[j];
        store_columns<W, NV>(state + c * values, width, row);
    }
}

/* Vectors of columns that go together, for W lanes. */
inline int vectors_of(int64_t lanes, int64_t values) { return values > 2 * lanes ? 4 : values > lanes ? 2 : 1; }

inline int64_t lanes_here() {
    const int set = instruction_set();
    return set == 4 ? 16 : set == 3 ? 8 : 4;
}
