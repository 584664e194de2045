/* One layer of the model, for the rows of any number of sequences: read it from the bottom up, layer_forward first.
 *
 * Products, the recurrence, attention, routing and experts are functions of other files; this one says in which order they act, on
 * what, and where results lie. Sublayer outputs are added to the running sum by the product that makes them.
 */
#include "layer.h"

#include <algorithm>

#include "depth.h"
#include "layer_rows.h"
#include "router.h"

namespace gnomon {

namespace {

/* Where a sublayer's intermediate rows lie; a mixer and a feed-forward use the same memory one after the other. */
struct KDAWork {
    float *qkv, *low, *decay, *beta, *gate_low, *gate, *mixed;
    KDAWork(const Model& m, const KDALayer& w, int64_t rows, Arena& s) {
        const int64_t width = m.kda_heads * m.kda_width;
        qkv = s.take(rows * 3 * width);
        low = s.take(rows * w.decay_a.out);
        decay = s.take(rows * width);
        beta = s.take(rows * m.kda_heads);
        gate_low = s.take(rows * w.gate_a.out);
        gate = s.take(rows * width);
        mixed = s.take(rows * width);
    }
};

struct MLAWork {
    float *query_low, *query, *latent, *gate, *mixed;
    MLAWork(const Model& m, const MLALayer& w, int64_t rows, Arena& s) {
        query_low = s.take(rows * w.query_a.out);
        query = s.take(rows * w.query.out);
        latent = s.take(rows * w.latent.out);
        gate = s.take(rows * w.gate.out);
        mixed = s.take(rows * m.mla.heads * m.mla.value);
    }
};

struct FeedWork {
    float *gate, *up, *logits, *weights, *latent, *mixed;
    int32_t* ids;
    FeedWork(const Model& m, const FeedForward& w, int64_t rows, Arena& s) {
        const bool routed = w.routed.count > 0;
        gate = s.take(rows * w.gate.out);
        up = s.take(rows * w.up.out);
        logits = s.take(rows * w.router.out);
        weights = s.take(routed ? rows * m.experts_per_token : 0);
        ids = s.take<int32_t>(routed ? rows * m.experts_per_token : 0);
        latent = s.take(rows * w.to_latent.out);
        mixed = s.take(routed ? rows * (w.to_latent.out ? w.to_latent.out : m.hidden) : 0);
    }
};

/* The same input rows through several matrices at once; what is absent (out = 0) is left out. */
struct Fan {
    const Matrix* matrices[5];
    float* outputs[5];
    int64_t count = 0;
    void add(const Matrix& matrix, float* output) {
        if (matrix.out == 0) return;
        matrices[count] = &matrix;
        outputs[count++] = output;
    }
};

struct Sublayer {
    Pool& pool;
    const Model& model;
    const Pools& pools;
    const Pass& pass;
    Stream& stream;
    const float* x; /* its input: read, mixed and normalised */

    /* The running sum grows by W y; the first output after a commit starts it. */
    void add(const Matrix& matrix, const float* y) {
        multiply(pool, matrix, y, pass.rows, matrix.in, stream.sources[stream.banked], model.hidden, stream.open);
        stream.open = true;
    }

    void add_rows_of(const float* y) {
        add_rows(pool, y, pass.rows * model.hidden, stream.sources[stream.banked], stream.open);
        stream.open = true;
    }

    void project(const Fan& fan) { multiply_many(pool, fan.matrices, fan.outputs, fan.count, x, pass.rows, model.hidden); }
    void project(const Matrix& matrix, const float* from, float* to) {
        multiply(pool, matrix, from, pass.rows, matrix.in, to, matrix.out);
    }
};

/* The recurrence of sequences [first, last), which all advance or all hold their state. */
void recur(Sublayer& s, const Layer& layer, const KDAWork& work, int64_t first, int64_t last, bool advance) {
    const Model& m = s.model;
    if (s.pass.bounds[first] == s.pass.bounds[last]) return;
    const int64_t width = m.kda_heads * m.kda_width;
    const KDARows rows = {s.pass.bounds + first, last - first, {work.qkv, 3 * width}, {work.decay, width}, {work.beta, m.kda_heads},
                          {work.gate, width}, work.mixed, width};
    const KDASlots slots = slots_of(m, s.pools, layer.place, s.pass.slots + first);
    const KDACopies copies = {s.pass.copies, advance ? s.pass.copied : 0, slots.conv, slots.matrix};
    /* the function counts inputs from row 0 of the pass, the record from the first held row */
    float* const record = s.pass.record + layer.place * s.pass.record_layer - s.pass.bounds[first] * record_floats(m);
    kda_decode(s.pool, kda_of(m, layer), rows, slots, advance, copies, advance ? nullptr : record);
}

void mix_kda(Sublayer& s, const Layer& layer, Arena scratch) {
    const KDALayer& w = layer.kda;
    const KDAWork work(s.model, w, s.pass.rows, scratch);
    Fan fan;
    fan.add(w.qkv, work.qkv);
    fan.add(w.decay_a, work.low);
    fan.add(w.beta, work.beta);
    if (w.gate_a.out) fan.add(w.gate_a, work.gate_low);
    else fan.add(w.gate, work.gate);
    s.project(fan);
    s.project(w.decay_b, work.low, work.decay);
    if (w.gate_a.out) s.project(w.gate, work.gate_low, work.gate);
    recur(s, layer, work, 0, s.pass.held, true);
    recur(s, layer, work, s.pass.held, s.pass.sequences, false);
    s.add(w.out, work.mixed);
}

/* One layer's part of every page. */
LatentPages pages_of(const Model& m, const Pools& pools, int64_t place) {
    const int64_t before = place * pools.page_tokens * (m.mla.latent + m.mla.rope);
    char* const rows = static_cast<char*>(pools.latents) + before * (pools.latent_format == F32 ? 4 : 2);
    return {rows, pools.page_tokens, m.mla_layers * pools.page_tokens, pools.latent_format};
}

void mix_mla(Sublayer& s, const Layer& layer, Arena scratch) {
    const Model& m = s.model;
    const MLALayer& w = layer.mla;
    const int64_t rows = s.pass.rows;
    const MLAWork work(m, w, rows, scratch);
    Fan fan;
    if (w.query_a.out) fan.add(w.query_a, work.query_low);
    else fan.add(w.query, work.query);
    fan.add(w.latent, work.latent);
    fan.add(w.gate, work.gate);
    s.project(fan);
    if (w.query_a.out) {
        normalise(s.pool, work.query_low, w.query_norm, rows, w.query_a.out, w.query_a.out, m.latent_eps);
        s.project(w.query, work.query_low, work.query);
    }
    normalise(s.pool, work.latent, w.latent_norm, rows, m.mla.latent, w.latent.out, m.latent_eps);
    const LatentPages pages = pages_of(m, s.pools, layer.place);
    const LatentBatch batch = {s.pass.sequences, s.pass.pages_each, s.pass.pages, s.pass.past, s.pass.bounds};
    append_latents(m.mla, pages, batch, work.latent, w.latent.out);
    latent_attention(s.pool, m.mla, w.keys_values, pages, batch, work.query, work.mixed);
    if (w.gate.out) gate_rows(s.pool, work.mixed, work.gate, rows, w.gate.out);
    s.add(w.out, work.mixed);
}

/* Which experts the rows of the pass go to, where the caller wants to know. */
void note_chosen(const Sublayer& s, const Layer& layer, const int32_t* ids) {
    const Pass& pass = s.pass;
    const int64_t k = s.model.experts_per_token, stride = s.model.routed_layers * k;
    for (int64_t i = 0; i < pass.sequences; ++i)
        for (int64_t row = pass.bounds[i]; row < pass.bounds[i + 1]; ++row)
            std::copy_n(ids + row * k, k, pass.chosen + (pass.origin[i] + row - pass.bounds[i]) * stride + layer.routed * k);
}

/* Dense, or experts beside shared ones: router and shared experts read the full width, routed experts the latent. */
void feed_forward(Sublayer& s, const Layer& layer, Arena scratch) {
    const Model& m = s.model;
    const FeedForward& w = layer.feed;
    const int64_t rows = s.pass.rows, k = m.experts_per_token;
    const FeedWork work(m, w, rows, scratch);
    Fan fan;
    fan.add(w.gate, work.gate);
    fan.add(w.up, work.up);
    fan.add(w.to_latent, work.latent);
    fan.add(w.router, work.logits);
    s.project(fan);
    if (w.routed.count) {
        const Choice choice = {w.routed.count, k, m.groups, m.kept_groups, m.renormalise != 0, m.routed_scale};
        route(s.pool, choice, work.logits, rows, w.bias, work.ids, work.weights);
        if (s.pass.chosen) note_chosen(s, layer, work.ids);
        const float* z = w.to_latent.out ? work.latent : s.x;
        experts(s.pool, w.routed, z, work.ids, work.weights, rows, k, work.mixed, m.mxfp8 != 0);
        if (w.norm) normalise(s.pool, work.mixed, w.norm, rows, w.to_latent.out, w.to_latent.out, m.eps);
        if (w.from_latent.out) s.add(w.from_latent, work.mixed);
        else s.add_rows_of(work.mixed);
    }
    if (w.gate.out) {
        situ_rows(s.pool, work.gate, work.up, rows, w.gate.out, m.beta1, m.beta2);
        s.add(w.down, work.gate);
    }
}

void bank(Stream& stream, bool commit) {
    if (!commit || !stream.open) return;
    ++stream.banked;
    stream.open = false;
}

}  // namespace

KDADecode kda_of(const Model& m, const Layer& layer) {
    const KDALayer& w = layer.kda;
    return {m.kda_heads, m.kda_width, m.taps, w.conv, w.a_log, w.dt_bias, w.norm, m.lower_bound, m.eps};
}

KDASlots slots_of(const Model& m, const Pools& pools, int64_t place, const int64_t* slots) {
    return {pools.conv + place * conv_floats(m), pools.matrices + place * m.kda_heads * m.kda_width * m.kda_width, slots};
}

int64_t layer_scratch_bytes(const Model& m, int64_t rows) {
    int64_t most = 0;
    for (int64_t i = 0; i < m.layers; ++i) {
        Arena mixer{nullptr}, feed{nullptr};
        if (m.layer[i].mixer == KDA_MIXER) KDAWork(m, m.layer[i].kda, rows, mixer);
        else MLAWork(m, m.layer[i].mla, rows, mixer);
        FeedWork(m, m.layer[i].feed, rows, feed);
        most = std::max({most, mixer.used, feed.used});
    }
    Arena input{nullptr};
    input.take(rows * m.hidden);
    return input.used + most;
}

void read_stream(Pool& pool, const Model& m, const float* query, const float* norm, const Stream& stream, int64_t first, int64_t rows,
                 float* x) {
    const int64_t count = stream.banked + (stream.open ? 1 : 0);
    for (int64_t j = 0; j < count; ++j) stream.window[j] = stream.sources[j] + first * m.hidden;
    depth_read_norm(pool, {query, norm, m.hidden, m.eps}, stream.window, count, rows, nullptr, x);
}

void layer_forward(Pool& pool, const Model& model, const Layer& layer, const Pools& pools, const Pass& pass, Stream& stream,
                   char* scratch) {
    Arena memory{scratch};
    float* const x = memory.take(pass.rows * model.hidden);
    Sublayer sublayer{pool, model, pools, pass, stream, x};

    read_stream(pool, model, layer.mixer_query, layer.mixer_norm, stream, 0, pass.rows, x);
    bank(stream, layer.commits & BEFORE_MIXER);
    if (layer.mixer == KDA_MIXER) mix_kda(sublayer, layer, memory);
    else mix_mla(sublayer, layer, memory);

    read_stream(pool, model, layer.feed_query, layer.feed_norm, stream, 0, pass.rows, x);
    bank(stream, layer.commits & BEFORE_FEED_FORWARD);
    feed_forward(sublayer, layer, memory);
}

}  // namespace gnomon
