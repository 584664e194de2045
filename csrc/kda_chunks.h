/* A window of tokens of one head cut into chunks, for the gradients of Kimi Delta Attention: see kda_backward.cpp. */
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "elements.h"
#include "tiles.h"

namespace {

constexpr int64_t CHUNK = 16;
constexpr float FARTHEST = 41.0f; /* the sum of log decays between a token and the anchor: 8 tokens at K3's bound are 40 below zero */

int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

struct Call {
    Input q, k, g, beta;
    const float *error, *states, *d_o, *d_last;
    float *d_q, *d_k, *d_v, *d_g, *d_beta, *d_initial;
    int64_t heads, keys, values, period;
    int64_t panel; /* channels that a tile covers */
    int64_t padded_keys() const { return round_up(keys, panel); }
    int64_t padded_values() const { return round_up(values, panel); }
};

/* One head of one document. */
struct Stretch {
    int64_t token, length, head;
    int64_t state;        /* its place in d_last and d_initial */
    int64_t first_period; /* of its document, among the kept states */
    int64_t row(const Call& a, int64_t t) const { return (token + t) * a.heads + head; }
};

/* A chunk. Matrices over tokens are [CHUNK, padded], zero where there is no token or channel. States stand in panels
 * [padded_keys / panel][padded_values][panel]: value channels along the rows, key channels along the vectors. */
struct Chunk {
    int64_t first, count;
    float *rows;            /* q row, then k row: [2 CHUNK, padded_keys] */
    float *row, *col;       /* the decay since the anchor, and until it */
    float *k_col, *k_end;   /* k decayed until the anchor, and until the chunk's end */
    float *anchor, *end;    /* [padded_keys]: the decay from the chunk's start to the anchor, and to its end */
    float *last_row;        /* [padded_keys]: row of the last token */
    float *products;        /* A_qk, then A_kk: [2 CHUNK, CHUNK] */
    float *grads;           /* d_o, then -d_e: [2 CHUNK, padded_values] */
    float *u;               /* [CHUNK, padded_values] */
    float *d_beta;          /* by panel of values: [padded_values / panel, CHUNK] */
    float *state, *d_state; /* before the chunk; the gradient after it */
};

struct Window {
    std::vector<float> memory, d_state; /* d_state: panels [padded_values / panel][padded_keys][panel] */
    std::vector<Chunk> chunks;
};

int64_t floats_of_chunk(const Call& a) {
    const int64_t K = a.padded_keys(), V = a.padded_values();
    return CHUNK * (6 * K + 3 * V + 2 * CHUNK + V / a.panel) + 3 * K + 2 * K * V;
}

/* Cuts a window of a document into chunks and gives each its memory. */
void plan(const Call& a, const Stretch& s, int64_t window, Window& w) {
    const int64_t K = a.padded_keys(), V = a.padded_values(), first = window * a.period;
    std::vector<float> run(a.keys), g(a.keys);
    w.chunks.clear();
    for (int64_t t = first; t < std::min(s.length, first + a.period); ++t) {
        a.g.row(s.row(a, t) * a.keys, a.keys, g.data());
        const int64_t place = w.chunks.empty() ? CHUNK : t - w.chunks.back().first;
        float farthest = 0.0f;
        for (int64_t c = 0; c < a.keys; ++c) {
            run[c] = place == CHUNK / 2 ? g[c] : run[c] + g[c];
            farthest = std::max(farthest, std::abs(run[c]));
        }
        if (place == CHUNK || farthest > FARTHEST) {
            w.chunks.push_back({});
            w.chunks.back().first = t;
            std::fill(run.begin(), run.end(), 0.0f); /* nothing in its chunk comes before a first token's decay */
        }
        w.chunks.back().count = t + 1 - w.chunks.back().first;
    }
    const size_t needed = w.chunks.size() * round_up(floats_of_chunk(a), 16) + 16;
    if (w.memory.size() < needed) w.memory.resize(needed);
    float* at = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(w.memory.data()) + 63) / 64 * 64);
    const auto take = [&](int64_t n) { return (at += n) - n; };
    for (Chunk& c : w.chunks) {
        c.state = take(K * V), c.d_state = take(K * V), c.rows = take(2 * CHUNK * K), c.row = take(CHUNK * K), c.col = take(CHUNK * K);
        c.k_col = take(CHUNK * K), c.k_end = take(CHUNK * K), c.anchor = take(K), c.end = take(K), c.last_row = take(K);
        c.products = take(2 * CHUNK * CHUNK), c.grads = take(2 * CHUNK * V), c.u = take(CHUNK * V);
        c.d_beta = take(round_up(V / a.panel * CHUNK, 16));
    }
}

/* Rows r0 to r0 + R of x [2 CHUNK, width] against the CHUNK rows of y [CHUNK, width], whose transpose [width, CHUNK] is given. */
template <int W>
INLINE void pair_products(const float* x, int64_t width, const float* y_columns, int64_t count, float* out) {
    constexpr int R = TILE_ROWS<W>;
    for (int64_t r = 0; r < 2 * CHUNK; r += R) {
        Tile<W, R, CHUNK / W> tile;
        tile.clear();
        if (r % CHUNK < count) tile.multiply(x + r * width, width, 1, y_columns, CHUNK, width);
        tile.store_rows(out + r * CHUNK, CHUNK);
    }
    for (int64_t i = 0; i < CHUNK; ++i)
        for (int64_t j = 0; j < CHUNK; ++j) {
            if (j > i) out[i * CHUNK + j] = 0.0f;
            if (j >= i) out[(CHUNK + i) * CHUNK + j] = 0.0f;
        }
}

template <int W>
INLINE void columns_of(const float* x, int64_t width, float* columns) {
    for (int64_t c = 0; c < width; c += W)
        for (int64_t t = 0; t < CHUNK; t += W) transpose<W>(x + t * width + c, width, columns + c * CHUNK + t, CHUNK);
}

float* scratch_of_thread(int64_t floats) {
    thread_local std::vector<float> memory;
    if (memory.size() < static_cast<size_t>(floats + 16)) memory.resize(floats + 16);
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
}

/* Decay factors of a chunk from alpha [CHUNK, padded_keys]. Only products of neighbours: their rounding does not grow with the decay. */
template <int W>
INLINE void decay_factors(const Chunk& x, int64_t K, const float* alpha) {
    const int64_t anchor = std::min<int64_t>(CHUNK / 2, x.count) - 1;
    for (int64_t c = 0; c < K; c += W) {
        const vec<W> one = vec<W>{} + 1.0f;
        vec<W> run = one;
        for (int64_t t = anchor; t >= 0; --t) {
            store<W>(x.col + t * K + c, run);
            store<W>(x.row + t * K + c, one / run);
            run *= load<W>(alpha + t * K + c);
        }
        store<W>(x.anchor + c, run);
        vec<W> since = one;
        for (int64_t t = anchor + 1; t < x.count; ++t) {
            since *= load<W>(alpha + t * K + c);
            store<W>(x.row + t * K + c, since);
            store<W>(x.col + t * K + c, one / since);
        }
        store<W>(x.last_row + c, since);
        store<W>(x.end + c, run * since);
    }
}

template <int W>
INLINE void prepare_body(const Call& a, const Stretch& s, const Chunk& x) {
    const int64_t K = a.padded_keys(), V = a.padded_values();
    float* scratch = scratch_of_thread(CHUNK * K);
    std::fill(x.rows, x.rows + 2 * CHUNK * K, 0.0f);
    std::fill(x.k_col, x.k_col + CHUNK * K, 0.0f);
    std::fill(x.k_end, x.k_end + CHUNK * K, 0.0f);
    std::fill(x.grads, x.grads + 2 * CHUNK * V, 0.0f);
    std::fill(x.u, x.u + CHUNK * V, 0.0f);
    std::fill(scratch, scratch + CHUNK * K, 0.0f);
    for (int64_t t = 0; t < x.count; ++t) {
        const int64_t row = s.row(a, x.first + t);
        a.g.row(row * a.keys, a.keys, scratch + t * K);
        for (int64_t c = 0; c < K; c += W) store<W>(scratch + t * K + c, exponential<W>(load<W>(scratch + t * K + c)));
    }
    decay_factors<W>(x, K, scratch);
    for (int64_t t = 0; t < x.count; ++t) {
        const int64_t row = s.row(a, x.first + t);
        float *q = x.rows + t * K, *k = x.rows + (CHUNK + t) * K;
        a.q.row(row * a.keys, a.keys, q);
        a.k.row(row * a.keys, a.keys, k);
        for (int64_t c = 0; c < K; c += W) {
            const vec<W> key = load<W>(k + c), since = load<W>(x.row + t * K + c), until = load<W>(x.col + t * K + c) * key;
            store<W>(q + c, load<W>(q + c) * since);
            store<W>(k + c, key * since);
            store<W>(x.k_col + t * K + c, until);
            store<W>(x.k_end + t * K + c, until * load<W>(x.last_row + c));
        }
        const float beta = a.beta.one(row);
        std::copy_n(a.d_o + row * a.values, a.values, x.grads + t * V);
        for (int64_t v = 0; v < a.values; ++v) x.u[t * V + v] = beta * a.error[row * a.values + v];
    }
    columns_of<W>(x.k_col, K, scratch);
    pair_products<W>(x.rows, K, scratch, x.count, x.products);
}
DISPATCH(prepare, (const Call& a, const Stretch& s, const Chunk& x), (a, s, x))

}  // namespace
