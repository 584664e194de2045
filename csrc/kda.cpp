/* Kimi Delta Attention (report section 2.1.1) for CPUs. What each function computes stands in gnomon.h.
 *
 * The columns of the state are independent: a task owns one head of one document and some slices of its columns, and walks the tokens
 * in blocks that are converted once. In fp32 on a CPU, token by token needs about as many operations as the chunkwise form, whose
 * point is matrix units, has no large exponents to guard and no row that depends on a later one. */
#include <algorithm>
#include <cmath>
#include <vector>

#include "elements.h"
#include "gnomon.h"
#include "kda_columns.h"
#include "pages.h"
#include "regions.h"

namespace {

constexpr int64_t BLOCK = 32; /* tokens that are converted together */

struct Forward {
    Input q, k, v, g, beta;
    const float* initial;
    float *o, *last, *error, *states;
    int64_t heads, keys, values, period;
    int64_t slices, columns; /* of a head; columns of a slice */
};

/* A head of a document; its first token, the index of its state and of its document's first kept state. */
struct Walk {
    int64_t token, length, head, state, first_period;
    int64_t first_slice, last_slice;
};

template <int W, int NV>
INLINE void forward_slices(const Forward& a, const Walk& w, float* scratch) {
    const int64_t K = a.keys, V = a.values, from = w.first_slice * a.columns, values = std::min(V, w.last_slice * a.columns) - from;
    float *q = scratch, *k = q + BLOCK * K, *decay = k + BLOCK * K, *v = decay + BLOCK * K, *beta = v + BLOCK * V, *state = beta + BLOCK;
    const auto slice = [&](int64_t i) { return state + i * K * a.columns; };
    const auto width = [&](int64_t i) { return std::min(a.columns, V - i * a.columns); };
    for (int64_t i = w.first_slice; i < w.last_slice; ++i)
        load_slice<W, NV>(a.initial ? a.initial + w.state * K * V + i * a.columns : nullptr, K, V, width(i), slice(i));
    for (int64_t seen = 0; seen < w.length;) {
        int64_t block = std::min(BLOCK, w.length - seen);
        if (a.states) {
            if (seen % a.period == 0)
                for (int64_t i = w.first_slice; i < w.last_slice; ++i)
                    store_slice<W, NV>(slice(i), K, V, width(i),
                                       a.states + ((w.first_period + seen / a.period) * a.heads + w.head) * K * V + i * a.columns);
            block = std::min(block, a.period - seen % a.period);
        }
        const int64_t row = (w.token + seen) * a.heads + w.head;
        for (int64_t t = 0; t < block; ++t) {
            const int64_t at = row + t * a.heads;
            a.q.row(at * K, K, q + t * K);
            a.k.row(at * K, K, k + t * K);
            a.v.row(at * V + from, values, v + t * V + from);
            a.g.row(at * K, K, decay + t * K);
            beta[t] = a.beta.one(at);
        }
        for (int64_t i = 0; i < block * K; i += W) {
            const int64_t some = std::min<int64_t>(W, block * K - i);
            store_some<W>(decay + i, some, exponential<W>(load_some<W>(decay + i, some)));
        }
        for (int64_t i = w.first_slice; i < w.last_slice; ++i) {
            const int64_t at = row * V + i * a.columns;
            walk_columns<W, NV>({q, k, decay, K, K, v + i * a.columns, V, beta, 1, a.o + at, a.error ? a.error + at : nullptr,
                                 a.heads * V, block},
                                K, width(i), slice(i));
        }
        seen += block;
    }
    for (int64_t i = w.first_slice; i < w.last_slice; ++i)
        store_slice<W, NV>(slice(i), K, V, width(i), a.last + w.state * K * V + i * a.columns);
}

template <int W>
INLINE void forward_body(const Forward& a, const Walk& w, float* scratch) {
    if (a.columns == 4 * W) forward_slices<W, 4>(a, w, scratch);
    else if (a.columns == 2 * W) forward_slices<W, 2>(a, w, scratch);
    else forward_slices<W, 1>(a, w, scratch);
}
DISPATCH(forward, (const Forward& a, const Walk& w, float* scratch), (a, w, scratch))

float* scratch_of_thread(const Forward& a) {
    thread_local std::vector<float> memory;
    const size_t needed = BLOCK * (3 * a.keys + a.values + 1) + a.slices * a.keys * a.columns + 32;
    if (memory.size() < needed) memory.resize(needed);
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
}

void run(int threads, const Forward& a, const int64_t* bounds, int64_t documents) {
    std::vector<Walk> walks;
    const int64_t parts = documents * a.heads >= 2 * threads ? 1 : a.slices;
    int64_t first_period = 0;
    for (int64_t d = 0; d < documents; ++d) {
        const int64_t length = bounds[d + 1] - bounds[d];
        for (int64_t h = 0; h < a.heads; ++h)
            for (int64_t part = 0; part < parts; ++part)
                walks.push_back({bounds[d], length, h, d * a.heads + h, first_period, part * a.slices / parts,
                                 (part + 1) * a.slices / parts});
        first_period += (length + a.period - 1) / a.period;
    }
    each_task(threads, walks.size(), [&](int64_t i, int) { forward(a, walks[i], scratch_of_thread(a)); });
}

}  // namespace

extern "C" void gnomon_kda_forward(const void* q, const void* k, const void* v, const void* g, const void* beta, int32_t half,
                                   const float* initial, const int64_t* bounds, int64_t documents, int64_t heads, int64_t keys,
                                   int64_t values, int64_t period, float* o, float* last, float* error, float* states, int32_t threads) {
    const auto input = [&](const void* x, int bit) { return Input{x, (half >> bit & 1) != 0}; };
    const int64_t row = heads * values * static_cast<int64_t>(sizeof(float));
    int64_t periods = 0;
    for (int64_t d = 0; states && d < documents; ++d) periods += (bounds[d + 1] - bounds[d] + period - 1) / period;
    prefer_huge_pages(o, bounds[documents] * row);
    prefer_huge_pages(error, bounds[documents] * row);
    prefer_huge_pages(states, periods * keys * row);
    int64_t columns = lanes_here() * vectors_of(lanes_here(), values);
    while (columns > lanes_here() && documents * heads * ((values + columns - 1) / columns) < threads) columns /= 2;
    run(threads,
        {input(q, 0), input(k, 1), input(v, 2), input(g, 3), input(beta, 4), initial, o, last, error, states, heads, keys, values, period,
         (values + columns - 1) / columns, columns},
        bounds, documents);
}

extern "C" void gnomon_kda_step(const float* q, const float* k, const float* v, const float* g, const float* beta, const float* state,
                                int64_t rows, int64_t keys, int64_t values, float* o, float* next, int32_t threads) {
    std::vector<int64_t> bounds(rows + 1);
    for (int64_t r = 0; r <= rows; ++r) bounds[r] = r;
    gnomon_kda_forward(q, k, v, g, beta, 0, state, bounds.data(), rows, 1, keys, values, 1, o, next, nullptr, nullptr, threads);
}
