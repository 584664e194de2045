/* A call for the whole model: its rows are taken in passes of bounded size, each of which goes through all layers, so that memory does not
 * grow with the length of a prompt. Where a sequence is cut depends on its own positions alone, and so do its results.
 */
#include <algorithm>
#include <cstring>
#include <vector>

#include "layer.h"
#include "layer_rows.h"

namespace gnomon {

namespace {

const int64_t CUT = 512;             /* a pass ends a sequence's stretch at multiples of this position */
const int64_t CAPACITY = 2 * CUT;    /* rows of a pass: a whole stretch beside many sequences that bring one token each */

/* What lies in the arena during a call. */
struct Work {
    Pass pass;
    Stream stream;
    int64_t* done; /* [sequences] new tokens of earlier passes */
    char* scratch;
    int64_t capacity;

    Work(const Model& m, const Rows& rows, int64_t total, Arena& arena) {
        const int64_t n = rows.sequences;
        capacity = std::min(total, CAPACITY);
        pass.bounds = arena.take<int64_t>(n + 1);
        pass.past = arena.take<int64_t>(n);
        pass.slots = arena.take<int64_t>(n);
        pass.copies = arena.take<int64_t>(3 * rows.copied);
        pass.origin = arena.take<int64_t>(n);
        done = arena.take<int64_t>(n);
        stream.sources = arena.take<float*>(m.sources);
        stream.window = arena.take<const float*>(m.sources);
        float* const sources = arena.take<float>(m.sources * capacity * m.hidden);
        scratch = arena.take<char>(layer_scratch_bytes(m, capacity));
        if (!arena.base) return;
        for (int64_t j = 0; j < m.sources; ++j) stream.sources[j] = sources + j * capacity * m.hidden;
        std::fill(done, done + n, 0);
    }
};

/* Chooses the rows of the next pass; false when none are left. A held sequence comes in one stretch. */
bool next_pass(const Model& m, const Rows& rows, Work& work) {
    Pass& pass = work.pass;
    bool full = false;
    pass.bounds[0] = 0;
    for (int64_t s = 0; s < rows.sequences; ++s) {
        const int64_t left = rows.bounds[s + 1] - rows.bounds[s] - work.done[s], room = work.capacity - pass.bounds[s];
        pass.past[s] = rows.past[s] + work.done[s];
        pass.origin[s] = rows.bounds[s] + work.done[s];
        pass.slots[s] = rows.slots[s] * m.kda_layers;
        const int64_t stretch = s >= rows.held ? left : std::min(left, CUT - pass.past[s] % CUT);
        full = full || (s >= rows.held && stretch > room); /* held rows follow one another in the record */
        pass.bounds[s + 1] = pass.bounds[s] + (stretch > room || full ? 0 : stretch);
    }
    pass.rows = pass.bounds[rows.sequences];
    pass.copied = 0;
    for (int64_t c = 0; c < rows.copied; ++c) {
        const int64_t s = rows.copies[3 * c], seen = rows.copies[3 * c + 1] - work.done[s];
        if (seen < 1 || seen > pass.bounds[s + 1] - pass.bounds[s]) continue;
        const int64_t copy[3] = {s, seen, rows.copies[3 * c + 2] * m.kda_layers};
        std::memcpy(pass.copies + 3 * pass.copied++, copy, sizeof copy);
    }
    return pass.rows > 0;
}

/* A sequence without a past starts from zeros, whatever its slot held. */
void start_states(const Model& m, const Rows& rows, const Pools& pools) {
    const int64_t matrix = m.kda_layers * m.kda_heads * m.kda_width * m.kda_width, conv = m.kda_layers * conv_floats(m);
    for (int64_t s = 0; s < rows.sequences; ++s) {
        if (rows.past[s] > 0 || rows.bounds[s + 1] == rows.bounds[s] || m.kda_layers == 0) continue;
        std::memset(pools.matrices + rows.slots[s] * matrix, 0, matrix * sizeof(float));
        std::memset(pools.conv + rows.slots[s] * conv, 0, conv * sizeof(float));
    }
}

/* The embeddings of the pass's rows become its first source. */
void embed(const Model& m, const Rows& rows, Work& work) {
    const Pass& pass = work.pass;
    for (int64_t s = 0; s < rows.sequences; ++s) {
        const int64_t first = pass.origin[s], count = pass.bounds[s + 1] - pass.bounds[s];
        float* const to = work.stream.sources[0] + pass.bounds[s] * m.hidden;
        if (rows.embeddings) std::memcpy(to, rows.embeddings + first * m.hidden, count * m.hidden * sizeof(float));
        else look_up(m.embedding, m.embedding_format == BF16, rows.tokens + first, count, m.hidden, to);
    }
    work.stream.banked = 0;
    work.stream.open = true;
}

/* Where in the record the pass's held rows begin: after those of earlier passes. */
void place_record(const Model& m, const Rows& rows, Work& work) {
    int64_t before = 0;
    for (int64_t s = rows.held; s < rows.sequences; ++s) before += work.done[s];
    const int64_t width = record_floats(m), held = rows.bounds[rows.sequences] - rows.bounds[rows.held];
    work.pass.record = rows.record + before * width;
    work.pass.record_layer = held * width;
}

/* Hidden vectors of the wanted rows of the pass, neighbours together. */
void finish(Pool& pool, const Model& m, const Rows& rows, Work& work, float* hidden) {
    const Pass& pass = work.pass;
    int64_t start = 0, count = 0, place = 0; /* the run so far: rows of the pass, and where in `hidden` */
    auto flush = [&] {
        if (count) read_stream(pool, m, m.output_query, m.norm, work.stream, start, count, hidden + place * m.hidden);
        count = 0;
    };
    for (int64_t s = 0; s < rows.sequences; ++s) {
        const int64_t first = pass.origin[s], last = first + pass.bounds[s + 1] - pass.bounds[s];
        const int64_t* want = std::lower_bound(rows.wanted, rows.wanted + rows.wanted_count, first);
        for (; want < rows.wanted + rows.wanted_count && *want < last; ++want) {
            const int64_t row = pass.bounds[s] + *want - first, at = want - rows.wanted;
            if (row != start + count || at != place + count) {
                flush();
                start = row;
                place = at;
            }
            ++count;
        }
    }
    flush();
}

}  // namespace

}  // namespace gnomon

using namespace gnomon;

extern "C" void gnomon_model_sizes(int64_t* sizes) {
    sizes[0] = sizeof(Layer);
    sizes[1] = sizeof(Model);
    sizes[2] = sizeof(Pools);
    sizes[3] = sizeof(Rows);
}

extern "C" void gnomon_latent_weights_bytes(const void* shape, int32_t format, int64_t* bytes) {
    *bytes = latent_weights_bytes(*static_cast<const LatentShape*>(shape), format);
}

extern "C" void gnomon_latent_weights_pack(const void* shape, const void* kv_b, const void* weights) {
    const LatentWeights& w = *static_cast<const LatentWeights*>(weights);
    pack_latent_weights(*static_cast<const LatentShape*>(shape), kv_b, w.format, w.format, const_cast<void*>(w.packed));
}

extern "C" void gnomon_model_arena(const void* model, const void* rows, int64_t total, int64_t* bytes) {
    Arena arena{nullptr};
    Work(*static_cast<const Model*>(model), *static_cast<const Rows*>(rows), total, arena);
    *bytes = arena.used;
}

extern "C" void gnomon_model_forward(const void* model, const void* pools, const void* rows, float* hidden, float* logits, void* arena,
                                     int32_t threads) {
    const Model& m = *static_cast<const Model*>(model);
    const Rows& r = *static_cast<const Rows*>(rows);
    const Pools& states = *static_cast<const Pools*>(pools);
    Pool& workers = pool(threads);
    Arena memory{static_cast<char*>(arena)};
    Work work(m, r, r.bounds[r.sequences], memory);
    work.pass.sequences = r.sequences;
    work.pass.held = r.held;
    work.pass.pages = r.pages;
    work.pass.pages_each = r.pages_each;
    work.pass.chosen = r.chosen;
    start_states(m, r, states);
    while (next_pass(m, r, work)) {
        embed(m, r, work);
        place_record(m, r, work);
        for (int64_t i = 0; i < m.layers; ++i) layer_forward(workers, m, m.layer[i], states, work.pass, work.stream, work.scratch);
        finish(workers, m, r, work, hidden);
        for (int64_t s = 0; s < r.sequences; ++s) work.done[s] += work.pass.bounds[s + 1] - work.pass.bounds[s];
    }
    if (logits) multiply(workers, m.head, hidden, r.wanted_count, m.hidden, logits, m.vocabulary);
}

extern "C" void gnomon_model_advance(const void* model, const void* pools, const float* record, const int64_t* bounds,
                                     const int64_t* prefix, const int64_t* slots, int64_t sequences, int32_t threads) {
    const Model& m = *static_cast<const Model*>(model);
    const Pools& states = *static_cast<const Pools*>(pools);
    std::vector<int64_t> places(sequences);
    for (int64_t s = 0; s < sequences; ++s) places[s] = slots[s] * m.kda_layers;
    for (int64_t i = 0; i < m.layers; ++i) {
        const Layer& layer = m.layer[i];
        if (layer.mixer != KDA_MIXER) continue;
        const float* const inputs = record + layer.place * bounds[sequences] * record_floats(m);
        kda_commit(pool(threads), kda_of(m, layer), inputs, bounds, sequences, prefix, slots_of(m, states, layer.place, places.data()));
    }
}
