/* KDA of an inference engine (report section 2.1.1): what each function computes stands in kda.h.
 *
 * A task owns one head of one sequence and some slices of its columns. It walks the tokens in short blocks: convolution, norms, decay
 * and beta of the block once, then the recurrence slice by slice while the block is in the cache, then the gated norm. Where there
 * are too few heads for the threads, tasks own fewer columns and the norm follows when all of them are done. */
#include "kda.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "gnomon.h"
#include "kda_columns.h"
#include "pool.h"
#include "rows.h"

namespace {

using namespace gnomon;

constexpr int64_t BLOCK = 32; /* tokens that are prepared together */
constexpr float UNIT_EPS = 1e-6f; /* added to the sum of squares of a query or key */

struct Call {
    const KDADecode& layer;
    const KDARows& rows;
    const KDASlots& states;
    const KDACopies& copies;
    const int64_t* prefix; /* of each sequence's rows, or NULL for all */
    bool commit;
    float* inputs;
    int64_t slices, parts; /* column slices of a head, and how many tasks share them */
    int64_t columns() const { return 3 * layer.heads * layer.width; }
    int64_t first(int64_t s) const { return rows.bounds[s]; }
    int64_t count(int64_t s) const { return prefix ? prefix[s] : rows.bounds[s + 1] - rows.bounds[s]; }
    float* conv(int64_t s) const { return states.conv + states.slots[s] * (layer.taps - 1) * columns(); }
    float* matrix(int64_t s, int64_t h) const { return states.matrix + (states.slots[s] * layer.heads + h) * layer.width * layer.width; }
};

/* A block's tokens after the activations, for one head: [BLOCK, width] each, and a whole state as slices. */
struct Scratch {
    float *q, *k, *v, *decay, *o, *beta, *state;
};

/* This thread's memory, kept for the next call: at a token per call, asking the system for it would cost more than the work. */
Scratch scratch_of_thread(const KDADecode& layer, int64_t slices, int64_t columns) {
    thread_local std::vector<float> memory;
    const int64_t block = BLOCK * layer.width, needed = 5 * block + BLOCK + slices * columns * layer.width + 16;
    if (memory.size() < static_cast<size_t>(needed)) memory.resize(needed);
    float* at = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
    return {at, at + block, at + 2 * block, at + 3 * block, at + 4 * block, at + 5 * block, at + 5 * block + BLOCK};
}

/* The projected inputs at position p of a sequence: an own row, or one of its history. */
INLINE const float* projected(const Call& call, int64_t s, int64_t p) {
    if (p >= 0) return call.rows.projected.data + (call.first(s) + p) * call.rows.projected.stride;
    return call.conv(s) + (call.layer.taps - 1 + p) * call.columns();
}

/* Convolution and SiLU of channels [channel, channel + width) at position t, into y. */
template <int W>
INLINE void convolve(const Call& call, int64_t s, int64_t t, int64_t channel, float* y) {
    const KDADecode& layer = call.layer;
    for (int64_t i = 0; i < layer.width; i += W) {
        const int64_t here = std::min<int64_t>(W, layer.width - i);
        vec<W> x = {};
        for (int64_t j = 0; j < layer.taps; ++j)
            x += load_some<W>(layer.conv_weight + j * call.columns() + channel + i, here) *
                 load_some<W>(projected(call, s, t - layer.taps + 1 + j) + channel + i, here);
        store_some<W>(y + i, here, x * sigmoid<W>(x));
    }
}

template <int W>
INLINE void scale_to_unit(float* x, int64_t n, float scale) {
    const float factor = scale / std::sqrt(dot<W>(x, x, n) + UNIT_EPS);
    for (int64_t i = 0; i < n; i += W) {
        const int64_t here = std::min<int64_t>(W, n - i);
        store_some<W>(x + i, here, factor * load_some<W>(x + i, here));
    }
}

/* log(1 + exp(x)): max(x, 0) + log1p(y) with y = exp(-|x|), by the series of 2 artanh(y / (2 + y)). */
template <int W>
INLINE vec<W> softplus(vec<W> x) {
    const vec<W> zero = {}, y = exponential<W>(x < zero ? x : zero - x);
    const vec<W> r = y / (y + 2.0f), square = r * r;
    vec<W> series = zero + 1.0f / 17;
    for (int n = 15; n > 0; n -= 2) series = series * square + 1.0f / n;
    return (x < zero ? zero : x) + 2.0f * r * series;
}

template <int W>
INLINE void decays(const KDADecode& layer, int64_t h, const float* raw, float* y) {
    const float rate = std::exp(layer.a_log[h]);
    for (int64_t i = 0; i < layer.width; i += W) {
        const int64_t here = std::min<int64_t>(W, layer.width - i);
        const vec<W> z = load_some<W>(raw + i, here) + load_some<W>(layer.dt_bias + h * layer.width + i, here);
        const vec<W> g = layer.lower_bound < 0.0f ? layer.lower_bound * sigmoid<W>(rate * z) : -rate * softplus<W>(z);
        store_some<W>(y + i, here, exponential<W>(g));
    }
}

template <int W>
INLINE void prepare(const Call& call, int64_t s, int64_t h, int64_t from, int64_t count, const Scratch& x) {
    const int64_t K = call.layer.width, HK = call.layer.heads * K;
    for (int64_t t = 0; t < count; ++t) {
        const int64_t row = call.first(s) + from + t;
        convolve<W>(call, s, from + t, h * K, x.q + t * K);
        convolve<W>(call, s, from + t, HK + h * K, x.k + t * K);
        convolve<W>(call, s, from + t, 2 * HK + h * K, x.v + t * K);
        scale_to_unit<W>(x.q + t * K, K, 1.0f / std::sqrt(static_cast<float>(K)));
        scale_to_unit<W>(x.k + t * K, K, 1.0f);
        decays<W>(call.layer, h, call.rows.decay.data + row * call.rows.decay.stride + h * K, x.decay + t * K);
        const vec<W> beta = sigmoid<W>(vec<W>{} + call.rows.beta.data[row * call.rows.beta.stride + h]);
        x.beta[t] = beta[0];
    }
}

/* The last taps - 1 inputs of head h after `seen` new tokens, into a history that may be the sequence's own. */
void keep_history(const Call& call, int64_t s, int64_t h, int64_t seen, float* conv) {
    const int64_t K = call.layer.width, HK = call.layer.heads * K, kept = call.layer.taps - 1;
    for (int64_t i = 0; i < kept; ++i)
        for (int64_t part = 0; part < 3; ++part) {
            const int64_t channel = part * HK + h * K;
            std::memmove(conv + i * call.columns() + channel, projected(call, s, seen - kept + i) + channel, K * sizeof(float));
        }
}

void record(const Call& call, int64_t s, int64_t h) {
    const int64_t K = call.layer.width, HK = call.layer.heads * K, width = kda_inputs_width(call.layer);
    for (int64_t row = call.first(s); row < call.first(s) + call.count(s); ++row) {
        float* to = call.inputs + row * width;
        for (int64_t part = 0; part < 3; ++part)
            std::copy_n(call.rows.projected.data + row * call.rows.projected.stride + part * HK + h * K, K, to + part * HK + h * K);
        std::copy_n(call.rows.decay.data + row * call.rows.decay.stride + h * K, K, to + 3 * HK + h * K);
        to[4 * HK + h] = call.rows.beta.data[row * call.rows.beta.stride + h];
    }
}

template <int W>
INLINE void normalise_rows_body(const Call& call, int64_t s, int64_t h, int64_t from, int64_t count) {
    const int64_t K = call.layer.width;
    for (int64_t row = call.first(s) + from; row < call.first(s) + from + count; ++row) {
        float* o = call.rows.out + row * call.rows.out_stride + h * K;
        rms_row_body<W>(o, call.layer.norm, call.rows.gate.data + row * call.rows.gate.stride + h * K, K, call.layer.eps, o);
    }
}
DISPATCH(normalise_rows, (const Call& call, int64_t s, int64_t h, int64_t from, int64_t count), (call, s, h, from, count))

/* One token, whole rows of the state at a time where the registers hold them. */
template <int W, int NV>
INLINE void head_token(const Call& call, int64_t s, int64_t h, int64_t first, int64_t last, const Scratch& x) {
    const int64_t K = call.layer.width;
    prepare<W>(call, s, h, 0, 1, x);
    float* out = call.rows.out ? call.rows.out + call.first(s) * call.rows.out_stride + h * K : x.o;
    for (int64_t v = first; v < last; v += W * NV)
        step_columns<W, NV>({x.q, x.k, x.decay, K, K, x.v + v, K, x.beta, 1, out + v, nullptr, K, 1}, K, K,
                            std::min<int64_t>(W * NV, last - v), call.matrix(s, h) + v, call.commit, x.state);
    if (call.parts != 1) return;
    if (call.rows.out) normalise_rows_body<W>(call, s, h, 0, 1);
    if (call.commit) keep_history(call, s, h, 1, call.conv(s));
}

template <int W, int NV>
INLINE void head_columns(const Call& call, int64_t s, int64_t h, int64_t part, const Scratch& x) {
    const int64_t K = call.layer.width, columns = W * NV, count = call.count(s);
    const int64_t first = part * call.slices / call.parts, last = (part + 1) * call.slices / call.parts;
    if (count == 1 && call.copies.count == 0) {
        const int64_t from = first * columns, to = std::min(K, last * columns);
        if (W == 16 && to - from == 8 * W) head_token<W, 2 * NV>(call, s, h, from, to, x);
        else head_token<W, NV>(call, s, h, from, to, x);
        return;
    }
    const auto slice = [&](int64_t i) { return x.state + i * K * columns; };
    const auto width = [&](int64_t i) { return std::min<int64_t>(columns, K - i * columns); };
    for (int64_t i = first; i < last; ++i) load_slice<W, NV>(call.matrix(s, h) + i * columns, K, K, width(i), slice(i));

    int64_t copy = 0, seen = 0;
    while (copy < call.copies.count && call.copies.at[3 * copy] < s) ++copy;
    for (;;) {
        for (; copy < call.copies.count && call.copies.at[3 * copy] == s && call.copies.at[3 * copy + 1] == seen; ++copy) {
            const int64_t slot = call.copies.at[3 * copy + 2];
            float* matrix = call.copies.matrix + (slot * call.layer.heads + h) * K * K;
            for (int64_t i = first; i < last; ++i) store_slice<W, NV>(slice(i), K, K, width(i), matrix + i * columns);
            if (part == 0) keep_history(call, s, h, seen, call.copies.conv + slot * (call.layer.taps - 1) * call.columns());
        }
        if (seen == count) break;
        int64_t block = std::min(BLOCK, count - seen);
        if (copy < call.copies.count && call.copies.at[3 * copy] == s) block = std::min(block, call.copies.at[3 * copy + 1] - seen);
        prepare<W>(call, s, h, seen, block, x);
        float* out = call.rows.out ? call.rows.out + (call.first(s) + seen) * call.rows.out_stride + h * K : x.o;
        const int64_t stride = call.rows.out ? call.rows.out_stride : K;
        for (int64_t i = first; i < last; ++i)
            walk_columns<W, NV>({x.q, x.k, x.decay, K, K, x.v + i * columns, K, x.beta, 1, out + i * columns, nullptr, stride, block}, K,
                                width(i), slice(i));
        if (call.parts == 1 && call.rows.out) normalise_rows_body<W>(call, s, h, seen, block);
        seen += block;
    }
    if (!call.commit) return;
    for (int64_t i = first; i < last; ++i) store_slice<W, NV>(slice(i), K, K, width(i), call.matrix(s, h) + i * columns);
    if (call.parts == 1) keep_history(call, s, h, count, call.conv(s));
}

template <int W>
INLINE void head_body(const Call& call, int64_t s, int64_t h, int64_t part, const Scratch& x) {
    const int vectors = vectors_of(W, call.layer.width);
    if (vectors == 4) head_columns<W, 4>(call, s, h, part, x);
    else if (vectors == 2) head_columns<W, 2>(call, s, h, part, x);
    else head_columns<W, 1>(call, s, h, part, x);
}
DISPATCH(head, (const Call& call, int64_t s, int64_t h, int64_t part, const Scratch& x), (call, s, h, part, x))

void run(Pool& pool, Call& call) {
    const int64_t heads = call.layer.heads, width = call.layer.width, tasks = call.rows.sequences * heads;
    const int64_t columns = lanes_here() * vectors_of(lanes_here(), width);
    call.slices = (width + columns - 1) / columns;
    call.parts = tasks >= pool.threads ? 1 : call.slices;
    parallel(pool, tasks * call.parts, [&](int64_t task, int) {
        const int64_t s = task / (heads * call.parts), h = task / call.parts % heads, part = task % call.parts;
        head(call, s, h, part, scratch_of_thread(call.layer, call.slices, columns));
        if (call.inputs && part == 0) record(call, s, h);
    });
    if (call.parts == 1) return;
    parallel(pool, tasks, [&](int64_t task, int) {
        const int64_t s = task / heads, h = task % heads;
        if (call.rows.out) normalise_rows(call, s, h, 0, call.count(s));
        if (call.commit) keep_history(call, s, h, call.count(s), call.conv(s));
    });
}

}  // namespace

void gnomon::kda_decode(Pool& pool, const KDADecode& layer, const KDARows& rows, const KDASlots& states, bool commit,
                        const KDACopies& copies, float* inputs) {
    Call call{layer, rows, states, copies, nullptr, commit, inputs, 0, 0};
    run(pool, call);
}

void gnomon::kda_commit(Pool& pool, const KDADecode& layer, const float* inputs, const int64_t* bounds, int64_t sequences,
                        const int64_t* prefix, const KDASlots& states) {
    const int64_t width = kda_inputs_width(layer), HK = layer.heads * layer.width;
    const KDARows rows{bounds, sequences, {inputs, width}, {inputs + 3 * HK, width}, {inputs + 4 * HK, width}, {nullptr, 0}, nullptr, 0};
    const KDACopies none{nullptr, 0, nullptr, nullptr};
    Call call{layer, rows, states, none, prefix, true, nullptr, 0, 0};
    run(pool, call);
}

extern "C" void gnomon_kda_decode(const float* conv_weight, const float* a_log, const float* dt_bias, const float* norm, float lower_bound,
                                  float eps, int64_t heads, int64_t width, int64_t taps, const int64_t* bounds, int64_t sequences,
                                  const float* projected, const float* decay, const float* beta, const float* gate, float* conv,
                                  float* matrix, const int64_t* slots, int32_t commit, const int64_t* copies_at, int64_t copies,
                                  float* copies_conv, float* copies_matrix, float* inputs, float* out, int32_t threads) {
    const KDADecode layer{heads, width, taps, conv_weight, a_log, dt_bias, norm, lower_bound, eps};
    const int64_t HK = heads * width;
    const KDARows rows{bounds, sequences, {projected, 3 * HK}, {decay, HK}, {beta, heads}, {gate, HK}, out, HK};
    const KDASlots states{conv, matrix, slots};
    const KDACopies wanted{copies_at, copies, copies_conv, copies_matrix};
    kda_decode(pool(threads), layer, rows, states, commit != 0, wanted, inputs);
}

extern "C" void gnomon_kda_commit(const float* conv_weight, const float* a_log, const float* dt_bias, float lower_bound, int64_t heads,
                                  int64_t width, int64_t taps, const float* inputs, const int64_t* bounds, int64_t sequences,
                                  const int64_t* prefix, float* conv, float* matrix, const int64_t* slots, int32_t threads) {
    const KDADecode layer{heads, width, taps, conv_weight, a_log, dt_bias, nullptr, lower_bound, 0.0f};
    kda_commit(pool(threads), layer, inputs, bounds, sequences, prefix, {conv, matrix, slots});
}
