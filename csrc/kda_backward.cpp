/* The gradients of Kimi Delta Attention in chunks of dense products. What the function computes stands in gnomon.h.
 *
 * Inside a chunk of at most CHUNK tokens, with the decay measured from an anchor token a in its middle, row_t = exp(G_t - G_a) and
 * col_t = 1 / row_t, every product of two tokens is dense. Chunks are cut short where the decay is so strong that these factors would
 * leave the range of fp32: with K3's bound of -5 they never are. The corrected values u = beta e are those that the forward pass kept.
 * With S the state before the chunk, D the gradient of the state after it, X' the transpose of X, and the lower triangles
 *     A_qk[i, j] = (q row)_i . (k col)_j  (j <= i),   A_kk[i, j] = (k row)_i . (k col)_j  (j < i)
 * the gradients are, per chunk and in this order,
 *     dU = A_qk' dO + (k end) D,   p = dU - A_kk' dE and dE = beta p from the last token to the first,   dv = dE,   dbeta = p . e
 *     D <- exp(G_end) D + (q start)' dO - (k start)' dE
 *     dA_qk = dO U',  dA_kk = -dE U',  dq = row (exp(G_a) dO S' + dA_qk (k col)),   and likewise for k as a row and as a column
 *     dg = the sum, over this and later tokens, of q dq + k (dk as a row - dk as a column), plus that of the chunk's end.
 *
 * Work goes by windows of `period` tokens, whose first state the forward pass kept. Three steps, each parallel in itself:
 * `prepare` (a chunk), `descend` (a panel of value columns: states forwards, their gradients backwards), `collect` (a chunk).
 * Whether one thread does all of a window or many share it changes no bit. */
#include <algorithm>
#include <utility>
#include <vector>

#include "gnomon.h"
#include "kda_chunks.h"
#include "pages.h"
#include "kda_columns.h"
#include "regions.h"

namespace {

/* Columns [column, column + panel) of a state [keys, values] as [padded_keys][panel], zero beyond its edges; x may be NULL. */
void load_panel(const Call& a, const float* x, int64_t column, float* panel) {
    std::fill(panel, panel + a.padded_keys() * a.panel, 0.0f);
    if (!x) return;
    const int64_t width = std::min(a.panel, a.values - column);
    for (int64_t c = 0; c < a.keys; ++c) std::copy_n(x + c * a.values + column, width, panel + c * a.panel);
}

/* A panel of value columns [padded_keys][P] into a state's rows v0 to v0 + P. */
template <int W>
INLINE void turn_panel(const float* panel, int64_t K, int64_t V, int64_t v0, float* state) {
    constexpr int64_t P = 2 * W;
    for (int64_t c = 0; c < K; c += W)
        for (int64_t v = 0; v < P; v += W) transpose<W>(panel + c * P + v, P, state + (c / P * V + v0 + v) * P + c % P, P);
}

/* The states before every chunk of a window, for one panel of value columns. */
template <int W>
INLINE void replay(const Call& a, const Window& w, int64_t v0) {
    constexpr int R = TILE_ROWS<W>;
    constexpr int64_t P = 2 * W;
    const int64_t K = a.padded_keys(), V = a.padded_values();
    for (size_t n = 0; n + 1 < w.chunks.size(); ++n) {
        const Chunk &x = w.chunks[n], &next = w.chunks[n + 1];
        for (int64_t c = 0; c < K; c += P) {
            const vec<W> end[2] = {load<W>(x.end + c), load<W>(x.end + c + W)};
            for (int64_t v = v0; v < v0 + P; v += R) {
                const int64_t at = (c / P * V + v) * P;
                Tile<W, R, 2> tile;
                tile.load_rows(x.state + at, P);
                for (int r = 0; r < R; ++r) tile.at[r][0] *= end[0], tile.at[r][1] *= end[1];
                tile.multiply(x.u + v, 1, V, x.k_end + c, K, x.count);
                tile.store_rows(next.state + at, P);
            }
        }
    }
}

/* The gradients of a chunk's corrected values, last token first; p [CHUNK][P] holds those from outputs and from the state after. */
template <int W>
INLINE void solve(const Call& a, const Stretch& s, const Chunk& x, int64_t v0, float* p) {
    constexpr int64_t P = 2 * W;
    const int64_t V = a.padded_values(), width = std::min(P, a.values - v0);
    for (int64_t t = x.count - 1; t >= 0; --t) {
        const int64_t row = s.row(a, x.first + t);
        const float beta = a.beta.one(row);
        vec<W> here[2] = {load<W>(p + t * P), load<W>(p + t * P + W)}, total = {};
        for (int j = 0; j < 2; ++j) {
            const int64_t some = std::min<int64_t>(W, width - j * W);
            if (some > 0) {
                total += here[j] * load_some<W>(a.error + row * a.values + v0 + j * W, some);
                store_some<W>(a.d_v + row * a.values + v0 + j * W, some, beta * here[j]);
            }
            here[j] *= -beta;
            store<W>(x.grads + (CHUNK + t) * V + v0 + j * W, here[j]);
        }
        x.d_beta[v0 / P * CHUNK + t] = sum<W>(total);
        for (int64_t i = 0; i < t; ++i) {
            const float product = x.products[(CHUNK + t) * CHUNK + i];
            for (int j = 0; j < 2; ++j) store<W>(p + i * P + j * W, load<W>(p + i * P + j * W) + product * here[j]);
        }
    }
}

template <int W>
INLINE void descend_body(const Call& a, const Stretch& s, Window& w, int64_t window, int64_t v0) {
    constexpr int R = TILE_ROWS<W>;
    constexpr int64_t P = 2 * W;
    const int64_t K = a.padded_keys(), V = a.padded_values();
    float *d_state = w.d_state.data() + v0 * K, *scratch = scratch_of_thread(K * P);
    alignas(64) float p[CHUNK * P];
    load_panel(a, a.states + ((s.first_period + window) * a.heads + s.head) * a.keys * a.values, v0, scratch);
    turn_panel<W>(scratch, K, V, v0, w.chunks[0].state);
    replay<W>(a, w, v0);
    for (size_t n = w.chunks.size(); n-- > 0;) {
        const Chunk& x = w.chunks[n];
        turn_panel<W>(d_state, K, V, v0, x.d_state);
        for (int64_t t = 0; t < x.count; t += R) {
            Tile<W, R, 2> tile;
            tile.clear();
            tile.multiply(x.products + t * CHUNK + t, 1, CHUNK, x.grads + t * V + v0, V, x.count - t);
            tile.multiply(x.k_end + t * K, K, 1, d_state, P, K);
            tile.store_rows(p + t * P, P);
        }
        solve<W>(a, s, x, v0, p);
        for (int64_t c = 0; c < K; c += R) {
            Tile<W, R, 2> tile;
            tile.clear();
            tile.multiply(x.rows + c, 1, K, x.grads + v0, V, x.count);
            tile.multiply(x.rows + CHUNK * K + c, 1, K, x.grads + CHUNK * V + v0, V, x.count);
            for (int r = 0; r < R; ++r)
                for (int j = 0; j < 2; ++j) {
                    float* at = d_state + (c + r) * P + j * W;
                    store<W>(at, x.end[c + r] * load<W>(at) + x.anchor[c + r] * tile.at[r][j]);
                }
        }
    }
}
DISPATCH(descend, (const Call& a, const Stretch& s, Window& w, int64_t window, int64_t v0), (a, s, w, window, v0))

/* The gradients of a chunk's queries, keys and decays in one panel of key channels. */
template <int W>
INLINE void collect_panel(const Call& a, const Stretch& s, const Chunk& x, const float* d_products, int64_t c0) {
    constexpr int R = TILE_ROWS<W>;
    constexpr int64_t P = 2 * W;
    const int64_t K = a.padded_keys(), V = a.padded_values();
    const float *state = x.state + c0 * V, *d_state = x.d_state + c0 * V;
    alignas(64) float as_row[2 * CHUNK * P], as_col[CHUNK * P];
    vec<W> at_end[2] = {};
    for (int64_t r = 0; r < 2 * CHUNK; r += R) {
        if (r % CHUNK >= x.count) continue;
        Tile<W, R, 2> tile;
        tile.clear();
        tile.multiply(x.grads + r * V, V, 1, state, P, V);
        for (int j = 0; j < 2; ++j)
            for (int i = 0; i < R; ++i) tile.at[i][j] *= load<W>(x.anchor + c0 + j * W);
        tile.multiply(d_products + r * CHUNK, CHUNK, 1, x.k_col + c0, K, std::min<int64_t>(r % CHUNK + R, x.count));
        tile.store_rows(as_row + r * P, P);
    }
    for (int64_t t = 0; t < x.count; t += R) {
        Tile<W, R, 2> tile;
        tile.clear();
        tile.multiply(x.u + t * V, V, 1, d_state, P, V);
        for (int j = 0; j < 2; ++j)
            for (int i = 0; i < R; ++i) {
                tile.at[i][j] *= load<W>(x.last_row + c0 + j * W);
                at_end[j] += tile.at[i][j] * load<W>(x.k_col + (t + i) * K + c0 + j * W);
            }
        tile.multiply(d_products + t * CHUNK + t, 1, CHUNK, x.rows + t * K + c0, K, x.count - t);
        tile.multiply(d_products + (CHUNK + t) * CHUNK + t, 1, CHUNK, x.rows + (CHUNK + t) * K + c0, K, x.count - t);
        tile.store_rows(as_col + t * P, P);
    }
    vec<W> held[2] = {};
    for (int64_t v = 0; v < V; ++v)
        for (int j = 0; j < 2; ++j) held[j] += load<W>(state + v * P + j * W) * load<W>(d_state + v * P + j * W);
    for (int j = 0; j < 2; ++j) {
        const int64_t c = c0 + j * W, some = std::min<int64_t>(W, a.keys - c);
        if (some <= 0) break;
        vec<W> d_g = at_end[j] + held[j] * load<W>(x.end + c);
        for (int64_t t = x.count - 1; t >= 0; --t) {
            const int64_t at = s.row(a, x.first + t) * a.keys + c;
            const vec<W> d_q = load<W>(as_row + t * P + j * W), row = load<W>(as_row + (CHUNK + t) * P + j * W);
            const vec<W> col = load<W>(as_col + t * P + j * W), since = load<W>(x.row + t * K + c), until = load<W>(x.col + t * K + c);
            d_g += load<W>(x.rows + t * K + c) * d_q + load<W>(x.rows + (CHUNK + t) * K + c) * row - load<W>(x.k_col + t * K + c) * col;
            store_some<W>(a.d_q + at, some, d_q * since);
            store_some<W>(a.d_k + at, some, row * since + col * until);
            store_some<W>(a.d_g + at, some, d_g);
        }
    }
}

template <int W>
INLINE void collect_body(const Call& a, const Stretch& s, const Chunk& x) {
    const int64_t V = a.padded_values();
    float* columns = scratch_of_thread(CHUNK * V);
    alignas(64) float d_products[2 * CHUNK * CHUNK];
    columns_of<W>(x.u, V, columns);
    pair_products<W>(x.grads, V, columns, x.count, d_products);
    for (int64_t c = 0; c < a.padded_keys(); c += 2 * W) collect_panel<W>(a, s, x, d_products, c);
    for (int64_t t = 0; t < x.count; ++t) {
        float total = 0.0f;
        for (int64_t p = 0; p < V / a.panel; ++p) total += x.d_beta[p * CHUNK + t];
        a.d_beta[s.row(a, x.first + t)] = total;
    }
}
DISPATCH(collect, (const Call& a, const Stretch& s, const Chunk& x), (a, s, x))

/* Between a state's gradient [keys, values] and the panels of a window. */
void begin(const Call& a, const Stretch& s, Window& w) {
    w.d_state.resize(a.padded_keys() * a.padded_values());
    const float* last = a.d_last ? a.d_last + s.state * a.keys * a.values : nullptr;
    for (int64_t v = 0; v < a.padded_values(); v += a.panel) load_panel(a, last, v, w.d_state.data() + v * a.padded_keys());
}

void finish(const Call& a, const Stretch& s, const Window& w) {
    for (int64_t v = 0; v < a.values; v += a.panel)
        for (int64_t c = 0; c < a.keys; ++c)
            std::copy_n(w.d_state.data() + v * a.padded_keys() + c * a.panel, std::min(a.panel, a.values - v),
                        a.d_initial + (s.state * a.keys + c) * a.values + v);
}

int64_t windows_of(const Call& a, const Stretch& s) { return (s.length + a.period - 1) / a.period; }

/* One thread walks a stretch. */
void walk(const Call& a, const Stretch& s, Window& w) {
    begin(a, s, w);
    for (int64_t window = windows_of(a, s) - 1; window >= 0; --window) {
        plan(a, s, window, w);
        for (const Chunk& x : w.chunks) prepare(a, s, x);
        for (int64_t v = 0; v < a.padded_values(); v += a.panel) descend(a, s, w, window, v);
        for (const Chunk& x : w.chunks) collect(a, s, x);
    }
    finish(a, s, w);
}

/* All threads walk all stretches side by side. */
void walk_together(int threads, const Call& a, const std::vector<Stretch>& stretches) {
    std::vector<Window> windows(stretches.size());
    const int64_t panels = a.padded_values() / a.panel, count = static_cast<int64_t>(stretches.size());
    int64_t most = 0;
    for (const Stretch& s : stretches) most = std::max(most, windows_of(a, s));
    for (int64_t i = 0; i < count; ++i) begin(a, stretches[i], windows[i]);
    std::vector<std::pair<int64_t, const Chunk*>> chunks;
    for (int64_t window = most - 1; window >= 0; --window) {
        chunks.clear();
        for (int64_t i = 0; i < count; ++i) {
            windows[i].chunks.clear();
            if (window >= windows_of(a, stretches[i])) continue;
            plan(a, stretches[i], window, windows[i]);
            for (const Chunk& x : windows[i].chunks) chunks.emplace_back(i, &x);
        }
        each_task(threads, chunks.size(), [&](int64_t i, int) { prepare(a, stretches[chunks[i].first], *chunks[i].second); });
        each_task(threads, count * panels, [&](int64_t i, int) {
            if (!windows[i / panels].chunks.empty())
                descend(a, stretches[i / panels], windows[i / panels], window, i % panels * a.panel);
        });
        each_task(threads, chunks.size(), [&](int64_t i, int) { collect(a, stretches[chunks[i].first], *chunks[i].second); });
    }
    for (int64_t i = 0; i < count; ++i) finish(a, stretches[i], windows[i]);
}

}  // namespace

extern "C" void gnomon_kda_backward(const void* q, const void* k, const void* g, const void* beta, int32_t half, const float* error,
                                    const float* states, const float* d_o, const float* d_last, const int64_t* bounds, int64_t documents,
                                    int64_t heads, int64_t keys, int64_t values, int64_t period, float* d_q, float* d_k, float* d_v,
                                    float* d_g, float* d_beta, float* d_initial, int32_t threads) {
    const Call a{{q, (half & 1) != 0}, {k, (half & 2) != 0}, {g, (half & 4) != 0}, {beta, (half & 8) != 0}, error, states, d_o, d_last,
                 d_q, d_k, d_v, d_g, d_beta, d_initial, heads, keys, values, period, 2 * lanes_here()};
    const int64_t of_keys = bounds[documents] * heads * keys * static_cast<int64_t>(sizeof(float));
    for (float* gradient : {d_q, d_k, d_g}) prefer_huge_pages(gradient, of_keys);
    prefer_huge_pages(d_v, of_keys / keys * values);
    std::vector<Stretch> stretches;
    int64_t first_period = 0;
    for (int64_t d = 0; d < documents; ++d) {
        const int64_t length = bounds[d + 1] - bounds[d];
        for (int64_t h = 0; h < heads; ++h) stretches.push_back({bounds[d], length, h, d * heads + h, first_period});
        first_period += (length + period - 1) / period;
    }
    if (static_cast<int64_t>(stretches.size()) < threads) return walk_together(threads, a, stretches);
    each_task(threads, stretches.size(), [&](int64_t i, int) {
        thread_local Window window; /* kept for the next call: its memory need not be asked for again */
        walk(a, stretches[i], window);
    });
}
