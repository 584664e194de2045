/* The depth read (report section 2.2) for CPUs: each token's sources pass once from memory through the first-level cache. What each
 * function computes stands in gnomon.h; the formulas of the backward pass stand in src/gnomon/kernels/depth/fused.py.
 */
#include <algorithm>
#include <cmath>
#include <vector>

#include "depth_rows.h"
#include "gnomon.h"

namespace {

const int64_t TILE = 1 << 19; /* bytes of sources of one tile: each is read twice, the second time from the second-level cache */

/* Tokens of one tile, at most 64. */
int64_t tile_tokens(int64_t count, int64_t width) {
    const int64_t bytes = std::max<int64_t>(1, count * width * static_cast<int64_t>(sizeof(float)));
    return std::min<int64_t>(64, std::max<int64_t>(1, TILE / bytes));
}

struct Read {
    const float* const* sources;
    const float *query, *grad;
    float *inverse_rms, *scores, *out; /* [count, total] of the first two */
    float* const* d_sources;
    float* d_query; /* of this thread */
    int64_t count, total, width, first, last;
    float eps;
};

/* p[j] = softmax of the token's scores. */
INLINE void softmax(const Read& r, int64_t token, float* p) {
    float largest = -INFINITY, total = 0.0f;
    for (int64_t j = 0; j < r.count; ++j) largest = std::max(largest, r.scores[j * r.total + token]);
    for (int64_t j = 0; j < r.count; ++j) total += p[j] = std::exp(r.scores[j * r.total + token] - largest);
    for (int64_t j = 0; j < r.count; ++j) p[j] /= total;
}

/* Tokens [first, last). Source by source where memory is read or written first: long runs, which the prefetcher follows. */
template <int W>
INLINE void forward_body(const Read& r, float* p) {
    for (int64_t j = 0; j < r.count; ++j) {
        for (int64_t token = r.first; token < r.last; ++token) {
            const float* v = r.sources[j] + token * r.width;
            r.scores[j * r.total + token] = score<W>(r.query, v, r.width, r.eps, r.inverse_rms + j * r.total + token);
        }
    }
    for (int64_t token = r.first; token < r.last; ++token) {
        const int64_t row = token * r.width;
        softmax(r, token, p);
        int64_t i = 0;
        for (; i + W <= r.width; i += W) {
            vec<W> mixed = {};
            for (int64_t j = 0; j < r.count; ++j) mixed += p[j] * load<W>(r.sources[j] + row + i);
            store<W>(r.out + row + i, mixed);
        }
        for (; i < r.width; ++i) {
            float mixed = 0.0f;
            for (int64_t j = 0; j < r.count; ++j) mixed += p[j] * r.sources[j][row + i];
            r.out[row + i] = mixed;
        }
    }
}

/* d = p dh + along_v v + along_u u (unless d is null) and d_query += along_u v, over one row. */
template <int W>
INLINE void spread(const Read& r, const float* v, const float* dh, float p, float along_v, float along_u, float* d) {
    int64_t i = 0;
    for (; i + W <= r.width; i += W) {
        const vec<W> x = load<W>(v + i);
        store<W>(r.d_query + i, load<W>(r.d_query + i) + along_u * x);
        if (d) store<W>(d + i, p * load<W>(dh + i) + along_v * x + along_u * load<W>(r.query + i));
    }
    for (; i < r.width; ++i) {
        r.d_query[i] += along_u * v[i];
        if (d) d[i] = p * dh[i] + along_v * v[i] + along_u * r.query[i];
    }
}

template <int W>
INLINE void backward_body(const Read& r, float* p) {
    float* dp = p + r.count * (r.last - r.first); /* p: one row of `count` per token; dp: one row of tokens per source */
    const int64_t tokens = r.last - r.first;
    for (int64_t j = 0; j < r.count; ++j) {
        for (int64_t t = 0; t < tokens; ++t) {
            float unused;
            const int64_t row = (r.first + t) * r.width;
            products<W>(r.sources[j] + row, r.grad + row, r.width, &dp[j * tokens + t], &unused);
        }
    }
    for (int64_t t = 0; t < tokens; ++t) {
        float mean = 0.0f;
        softmax(r, r.first + t, p + t * r.count);
        for (int64_t j = 0; j < r.count; ++j) mean += p[t * r.count + j] * dp[j * tokens + t];
        for (int64_t j = 0; j < r.count; ++j) dp[j * tokens + t] -= mean;
    }
    for (int64_t j = 0; j < r.count; ++j) {
        for (int64_t t = 0; t < tokens; ++t) {
            const int64_t token = r.first + t, row = token * r.width;
            const float weight = p[t * r.count + j], inverse = r.inverse_rms[j * r.total + token];
            const float along_u = weight * dp[j * tokens + t] * inverse;
            const float along_v = -along_u * inverse * r.scores[j * r.total + token] / static_cast<float>(r.width);
            spread<W>(r, r.sources[j] + row, r.grad + row, weight, along_v, along_u, r.d_sources[j] ? r.d_sources[j] + row : nullptr);
        }
    }
}

DISPATCH(forward, (const Read& r, float* p), (r, p))
DISPATCH(backward, (const Read& r, float* p), (r, p))

}  // namespace

extern "C" void gnomon_depth_forward(const float* const* sources, const float* query, int64_t count, int64_t tokens, int64_t width,
                                     float eps, float* inverse_rms, float* scores, float* out, int32_t threads) {
    const int64_t tile = tile_tokens(count, width);
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> p(count);
#pragma omp for schedule(static)
        for (int64_t first = 0; first < tokens; first += tile) {
            forward({sources, query, nullptr, inverse_rms, scores, out, nullptr, nullptr, count, tokens, width, first,
                     std::min(first + tile, tokens), eps}, p.data());
        }
    }
}

extern "C" void gnomon_depth_backward(const float* const* sources, const float* query, const float* inverse_rms, const float* scores,
                                      const float* grad, int64_t count, int64_t tokens, int64_t width, float* const* d_sources,
                                      float* d_query, int32_t threads) {
    /* d_query is summed per group of tiles and then in order, so that it does not depend on the number of threads. */
    const int64_t tile = tile_tokens(count, width), tiles = (tokens + tile - 1) / tile, groups = std::min<int64_t>(tiles, 16);
    std::vector<float> partial(groups * width, 0.0f);
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> p(2 * count * tile);
#pragma omp for schedule(static)
        for (int64_t group = 0; group < groups; ++group) {
            for (int64_t t = group * tiles / groups; t < (group + 1) * tiles / groups; ++t) {
                backward({sources, query, grad, const_cast<float*>(inverse_rms), const_cast<float*>(scores), nullptr, d_sources,
                          partial.data() + group * width, count, tokens, width, t * tile, std::min((t + 1) * tile, tokens), 0.0f},
                         p.data());
            }
        }
    }
    std::fill(d_query, d_query + width, 0.0f);
    for (int64_t group = 0; group < groups; ++group)
        for (int64_t i = 0; i < width; ++i) d_query[i] += partial[group * width + i];
}
