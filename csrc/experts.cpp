/* Routed experts for training (report section 2.3; section 5.2.2 for the backward pass). What each function computes stands in training.h.
 *
 * Pairs (token, slot) are sorted by expert. A thread takes an expert, packs its weights once, and takes its tokens through all products in
 * tiles, gathered into scratch that stays in cache; no copy of all tokens per expert exists. The forward pass keeps the two
 * pre-activations and nothing else: the gradient of a routing weight is <W_down' dy, a>, which needs no expert output.
 */
#include <algorithm>
#include <memory>
#include <vector>

#include "gnomon.h"
#include "lanes.h"
#include "product.h"
#include "situ.h"

namespace {

using namespace gnomon;

const int64_t MX_BLOCK = 32; /* neighbours that share an MXFP8 scale */

/* Rows of an intermediate as MXFP8 stores them, in place. */
void coarsen(float* rows, int64_t count) { gnomon_mxfp_round(rows, count / MX_BLOCK, 8, 0, rows, 1); }

const int64_t TILE = 96;   /* pairs taken through the products together: a multiple of the kernel's six rows */
const int64_t CHUNK = 768; /* pairs of one forward task: enough to pay for packing the weights, few enough to share an expert */
const int64_t TOKENS = 64; /* of one task when pairs return to their tokens */

typedef std::unique_ptr<float[]> Floats;

/* Everything a call works on, named as in training.h. */
struct Shape {
    const int64_t *order, *starts;
    int64_t experts, k, latent, inner;

    const float* row(const float* of_tokens, int64_t pair) const { return of_tokens + order[pair] / k * latent; }
    void gather(const float* of_tokens, int64_t pair, int64_t count, float* tile) const {
        for (int64_t i = 0; i < count; ++i) std::copy_n(row(of_tokens, pair + i), latent, tile + i * latent);
    }
};

struct Task {
    int64_t expert, first, last;
};

/* Tasks of at most `most` pairs, the largest first so that no thread is left with one at the end. */
std::vector<Task> tasks(const Shape& s, int64_t most) {
    std::vector<Task> all;
    for (int64_t e = 0; e < s.experts; ++e)
        for (int64_t first = s.starts[e]; first < s.starts[e + 1]; first += most)
            all.push_back({e, first, std::min(first + most, s.starts[e + 1])});
    std::stable_sort(all.begin(), all.end(), [](const Task& a, const Task& b) { return a.last - a.first > b.last - b.first; });
    return all;
}

template <int W>
INLINE void combine_body(const float* rows, const int64_t* position, const float* weights, int64_t k, int64_t width, float* out) {
    for (int64_t i = 0; i < width; i += W) {
        const int64_t left = std::min<int64_t>(W, width - i);
        vec<W> sum = {};
        for (int64_t j = 0; j < k; ++j) {
            const vec<W> x = load_some<W>(rows + position[j] * width + i, left);
            sum = weights ? sum + weights[j] * x : sum + x;
        }
        store_some<W>(out + i, left, sum);
    }
}

DISPATCH(combine, (const float* rows, const int64_t* position, const float* weights, int64_t k, int64_t width, float* out),
         (rows, position, weights, k, width, out))

/* out[n] = sum over slots, in their order, of weights[n][j] (or one) rows[position[n][j]]. */
void return_to_tokens(const float* rows, const int64_t* position, const float* weights, int64_t tokens, int64_t k, int64_t width,
                      float* out, int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t block = 0; block < tokens; block += TOKENS)
        for (int64_t n = block; n < std::min(block + TOKENS, tokens); ++n)
            combine(rows, position + n * k, weights ? weights + n * k : nullptr, k, width, out + n * width);
}

/* The gradients of one expert's stacks and of its pairs. */
struct Backward {
    const Shape& s;
    const float *z, *grad, *w_gate, *w_up, *w_down, *weights, *gate, *up;
    float beta1, beta2;
    bool mxfp8;
    float *d_rows, *d_gate_stack, *d_up_stack, *d_down_stack, *d_weights;
    Floats down, gate_panels, up_panels, x, dy, through, d_gate, d_up, hidden, packed_x, packed_hidden;

    void reserve() {
        const int64_t latent = s.latent, inner = s.inner;
        const auto floats = [](int64_t count) { return Floats(new float[count]); };
        down = floats(packed_size(latent, inner));
        gate_panels = floats(packed_size(inner, latent)), up_panels = floats(packed_size(inner, latent));
        x = floats(TILE * latent), dy = floats(TILE * latent);
        through = floats(TILE * inner), d_gate = floats(TILE * inner), d_up = floats(TILE * inner), hidden = floats(TILE * inner);
        packed_x = floats(packed_size(TILE, latent)), packed_hidden = floats(packed_size(TILE, inner));
    }

    void tile(int64_t expert, int64_t pair, int64_t count, bool first) {
        const int64_t latent = s.latent, inner = s.inner, offset = expert * inner * latent;
        float p[TILE], dp[TILE];
        for (int64_t i = 0; i < count; ++i) p[i] = weights[s.order[pair + i]];
        s.gather(z, pair, count, x.get());
        s.gather(grad, pair, count, dy.get());
        multiply({dy.get(), latent, down.get(), through.get(), inner, count, latent, 0, inner, false, false});
        situ_backward({through.get(), gate + pair * inner, up + pair * inner, p, d_gate.get(), d_up.get(), hidden.get(), dp, count, inner,
                       beta1, beta2});
        if (mxfp8) round_hidden(pair, count, p, dp);
        for (int64_t i = 0; i < count; ++i) d_weights[s.order[pair + i]] = dp[i];
        float* to = d_rows + pair * latent;
        multiply({d_gate.get(), inner, gate_panels.get(), to, latent, count, inner, 0, latent, false, false});
        multiply({d_up.get(), inner, up_panels.get(), to, latent, count, inner, 0, latent, false, true});
        pack(x.get(), latent, count, latent, packed_x.get());
        pack(hidden.get(), inner, count, inner, packed_hidden.get());
        multiply({dy.get(), latent, packed_hidden.get(), d_down_stack + offset, inner, latent, count, 0, inner, true, !first});
        multiply({d_gate.get(), inner, packed_x.get(), d_gate_stack + offset, latent, inner, count, 0, latent, true, !first});
        multiply({d_up.get(), inner, packed_x.get(), d_up_stack + offset, latent, inner, count, 0, latent, true, !first});
    }

    /* What was multiplied is the rounded intermediate: `hidden` becomes that times the pair's weight, and dp its product with `through`. */
    void round_hidden(int64_t pair, int64_t count, const float* p, float* dp) {
        const int64_t inner = s.inner;
        situ(gate + pair * inner, up + pair * inner, count * inner, beta1, beta2, hidden.get());
        coarsen(hidden.get(), count * inner);
        for (int64_t i = 0; i < count; ++i) {
            float *a = hidden.get() + i * inner, total = 0.0f;
            const float* g = through.get() + i * inner;
            for (int64_t j = 0; j < inner; ++j) {
                total += g[j] * a[j];
                a[j] *= p[i];
            }
            dp[i] = total;
        }
    }

    void expert(const Task& task) {
        const int64_t latent = s.latent, inner = s.inner, offset = task.expert * inner * latent;
        pack(w_down + offset, inner, latent, inner, down.get());
        pack(w_gate + offset, latent, inner, latent, gate_panels.get());
        pack(w_up + offset, latent, inner, latent, up_panels.get());
        for (int64_t pair = task.first; pair < task.last; pair += TILE)
            tile(task.expert, pair, std::min(TILE, task.last - pair), pair == task.first);
    }
};

}  // namespace

extern "C" void gnomon_grouped_forward(const float* z, const float* w_gate, const float* w_up, const float* w_down, const float* weights,
                     const int64_t* starts, const int64_t* order, const int64_t* position, int64_t tokens, int64_t k,
                     int64_t experts, int64_t latent, int64_t inner, float beta1, float beta2, float* gate, float* up,
                     float* y, int32_t mxfp8, int32_t threads) {
    const Shape s{order, starts, experts, k, latent, inner};
    const std::vector<Task> all = tasks(s, CHUNK);
    const Floats outputs(new float[tokens * k * latent]);
#pragma omp parallel num_threads(threads)
    {
        const Floats gates(new float[packed_size(latent, inner)]), ups(new float[packed_size(latent, inner)]);
        const Floats downs(new float[packed_size(inner, latent)]), x(new float[TILE * latent]), hidden(new float[TILE * inner]);
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < all.size(); ++i) {
            const Task& task = all[i];
            const int64_t offset = task.expert * inner * latent;
            pack_transposed(w_gate + offset, latent, latent, inner, gates.get());
            pack_transposed(w_up + offset, latent, latent, inner, ups.get());
            pack_transposed(w_down + offset, inner, inner, latent, downs.get());
            for (int64_t pair = task.first; pair < task.last; pair += TILE) {
                const int64_t count = std::min(TILE, task.last - pair);
                s.gather(z, pair, count, x.get());
                float *g = gate + pair * inner, *u = up + pair * inner;
                multiply({x.get(), latent, gates.get(), g, inner, count, latent, 0, inner, false, false});
                multiply({x.get(), latent, ups.get(), u, inner, count, latent, 0, inner, false, false});
                situ(g, u, count * inner, beta1, beta2, hidden.get());
                if (mxfp8) coarsen(hidden.get(), count * inner);
                multiply({hidden.get(), inner, downs.get(), outputs.get() + pair * latent, latent, count, inner, 0, latent, false, false});
            }
        }
    }
    return_to_tokens(outputs.get(), position, weights, tokens, k, latent, y, threads);
}

extern "C" void gnomon_grouped_backward(const float* z, const float* grad, const float* w_gate, const float* w_up, const float* w_down,
                      const float* weights, const float* gate, const float* up, const int64_t* starts,
                      const int64_t* order, const int64_t* position, int64_t tokens, int64_t k, int64_t experts,
                      int64_t latent, int64_t inner, float beta1, float beta2, float* d_z, float* d_gate, float* d_up,
                      float* d_down, float* d_weights, int32_t mxfp8, int32_t threads) {
    const Shape s{order, starts, experts, k, latent, inner};
    const std::vector<Task> all = tasks(s, tokens * k + 1);
    const Floats d_rows(new float[tokens * k * latent]);
    const int64_t size = inner * latent;
    for (int64_t e = 0; e < experts; ++e)
        if (starts[e] == starts[e + 1])
            for (float* stack : {d_gate, d_up, d_down}) std::fill_n(stack + e * size, size, 0.0f);
#pragma omp parallel num_threads(threads)
    {
        Backward own{s,     z,     grad,  w_gate,       w_up,   w_down, weights, gate,      up, beta1, beta2, mxfp8 != 0, d_rows.get(),
                     d_gate, d_up, d_down, d_weights, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                     nullptr, nullptr, nullptr};
        own.reserve();
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < all.size(); ++i) own.expert(all[i]);
    }
    return_to_tokens(d_rows.get(), position, nullptr, tokens, k, latent, d_z, threads);
}

extern "C" void gnomon_group(const int64_t* ids, int64_t pairs, int64_t experts, int64_t* range, int64_t* starts, int64_t* order,
                             int64_t* position) {
    range[0] = 0, range[1] = -1;
    if (pairs) {
        const auto ends = std::minmax_element(ids, ids + pairs);
        range[0] = *ends.first, range[1] = *ends.second;
    }
    if (range[0] < 0 || range[1] >= experts) return;
    std::fill_n(starts, experts + 1, 0);
    for (int64_t i = 0; i < pairs; ++i) ++starts[ids[i] + 1];
    for (int64_t e = 0; e < experts; ++e) starts[e + 1] += starts[e];
    std::vector<int64_t> next(starts, starts + experts);
    for (int64_t i = 0; i < pairs; ++i) order[position[i] = next[ids[i]]++] = i;
}
