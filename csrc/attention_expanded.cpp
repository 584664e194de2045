/* Latent attention with keys and values of each head written out, for sequences with many new tokens: a span of cached rows becomes keys
 * and values of a head once, then all new tokens attend to it. Keys go by blocks on a fixed grid, so a row's bits do not depend on its
 * company. */
#include <vector>

#include "attention_block.h"

namespace gnomon::attention {
namespace {

const int64_t SPAN = 4;   /* blocks that are expanded together: they stay in the second-level cache */
const int64_t CHUNK = 24; /* query rows whose results stay in the first-level cache over a span */

/* Rows first to last of a run, for one head. */
struct Task {
    const Run* run;
    int64_t head, first, last;
};

/* Memory of a task with `count` rows. */
struct Room {
    Scratch<word> rows, turned, keys, values, queries, p;
    Scratch<float> key_rows, value_rows, scores, context, largest, total, keep;
    Scratch<uint16_t> narrowed; /* two rows of elements */
    Room(const LatentShape& s, const Sizes& z, int64_t count)
        : rows(KEYS * z.row), turned(KEYS * z.row), keys(SPAN * KEYS * (z.nope + z.rope)), values(SPAN * z.value_panels * PANEL * z.keys),
          queries(count * (z.nope + z.rope)), p(CHUNK * z.keys), key_rows(s.nope * KEYS), value_rows(KEYS * z.value_panels * PANEL),
          scores(CHUNK * KEYS), context(count * z.value_panels * PANEL), largest(count), total(count), keep(CHUNK),
          narrowed(2 * std::max(KEYS, z.value_panels * PANEL)) {}
};

/* fp32 rows of `count` values, `stride` apart, as word rows of panels. */
template <int F>
INLINE void weave_rows(const float* rows, int64_t stride, int64_t row_count, int64_t count, int64_t words, uint16_t* narrowed,
                       word* panels) {
    for (int64_t i = 0; i < row_count; i += per_word<F>) {
        if constexpr (F == SINGLE) {
            weave<F>(rows + i * stride, nullptr, count, words, i, panels);
        } else {
            copy_row(rows + i * stride, count, count, narrowed);
            const bool both = i + 1 < row_count;
            if (both) copy_row(rows + (i + 1) * stride, count, count, narrowed + count);
            weave<F>(narrowed, both ? narrowed + count : nullptr, count, words, i / 2, panels);
        }
    }
}

/* Keys and values of one head for the `count` rows of the block at `first`. */
template <int W, int F>
INLINE void expand(const Call& c, const Sizes& z, const HeadWeights& w, int64_t sequence, int64_t first, int64_t count, const Room& m,
                   word* keys, word* values) {
    const LatentShape& s = c.shape;
    const int64_t value = z.value_panels * PANEL, panels = panels_for(count), words = z.nope + z.rope;
    stage<F>(s, z, c.pages, c.batch, sequence, first, count, m.rows);
    for (int64_t panel = 0; panel < panels; ++panel) {
        word* turned = m.turned + panel * z.row * PANEL;
        transpose_panel<W>(m.rows + panel * PANEL * z.row, z.row, z.row, turned);
        std::memcpy(keys + (panel * words + z.nope) * PANEL, turned + z.latent * PANEL, z.rope * PANEL * sizeof(word));
    }
    c.multiply({w.keys, z.latent, m.turned, z.row, z.latent, panels, m.key_rows, KEYS, nullptr}, s.nope);
    weave_rows<F>(m.key_rows, KEYS, s.nope, panels * PANEL, words, m.narrowed, keys);
    c.multiply({m.rows, z.row, w.values, z.latent, z.latent, z.value_panels, m.value_rows, value, nullptr}, count);
    weave_rows<F>(m.value_rows, value, count, value, z.keys, m.narrowed, values);
}

/* Rows first to last against one block of `count` keys from position `key` on; `seen` is what row 0 of the task sees. */
template <int W, int F>
INLINE void attend_block(const Call& c, const Sizes& z, const Room& m, int64_t first, int64_t last, int64_t seen, int64_t key,
                         int64_t count, const word* keys, const word* values) {
    const int64_t words = z.nope + z.rope, value = z.value_panels * PANEL, rows = last - first;
    c.multiply({m.queries + first * words, words, keys, words, words, panels_for(count), m.scores, KEYS, nullptr}, rows);
    for (int64_t i = 0; i < rows; ++i)
        soften<W, F>(m.scores + i * KEYS, std::min(KEYS, seen + first + i - key), c.shape.scale, m.largest + first + i, m.total + first + i,
                     m.keep + i, m.p + i * z.keys);
    c.multiply({m.p, z.keys, values, z.keys, words_for(count, per_word<F>), z.value_panels, m.context + first * value, value, m.keep},
                        rows);
}

template <int W, int F>
INLINE void expanded_body(const Call& c, const Task& t) {
    const LatentShape& s = c.shape;
    const Sizes z(s, per_word<F>);
    const HeadWeights w(s, z, c.weights.packed, t.head);
    const int64_t rows = t.last - t.first, words = z.nope + z.rope, value = z.value_panels * PANEL;
    const int64_t seen = t.run->seen + t.first, end = seen + rows - 1; /* of the first row; of the last */
    const Room m(s, z, rows);
    for (int64_t i = 0; i < rows; ++i) {
        const float* query = c.query(t.run->token + t.first + i, t.head);
        element<F>* out = reinterpret_cast<element<F>*>(m.queries + i * words);
        copy_row(query, s.nope, z.nope * per_word<F>, out);
        copy_row(query + s.nope, s.rope, z.rope * per_word<F>, out + z.nope * per_word<F>);
        m.largest[i] = -INFINITY, m.total[i] = 0.0f;
    }
    std::memset(m.context, 0, rows * value * sizeof(float));
    for (int64_t span = 0; span < end; span += SPAN * KEYS) {
        const int64_t span_end = std::min(end, span + SPAN * KEYS);
        for (int64_t key = span; key < span_end; key += KEYS) {
            const int64_t block = (key - span) / KEYS;
            expand<W, F>(c, z, w, t.run->sequence, key, std::min(KEYS, end - key), m, m.keys + block * KEYS * words,
                         m.values + block * value * z.keys);
        }
        for (int64_t chunk = 0; chunk < rows; chunk += CHUNK) {
            for (int64_t key = span; key < span_end; key += KEYS) {
                const int64_t block = (key - span) / KEYS, first = std::max(chunk, key - seen + 1), last = std::min(rows, chunk + CHUNK);
                if (first >= last) break;
                attend_block<W, F>(c, z, m, first, last, seen, key, std::min(KEYS, end - key), m.keys + block * KEYS * words,
                                   m.values + block * value * z.keys);
            }
        }
    }
    for (int64_t i = 0; i < rows; ++i) {
        float* out = c.result(t.run->token + t.first + i, t.head);
        for (int64_t v = 0; v < s.value; ++v) out[v] = m.context[i * value + v] / m.total[i];
    }
}

DISPATCH_OPERANDS(expanded, (const Call& c, const Task& t), (c, t))

}  // namespace

void attend_expanded(Pool& workers, const Call& c, const Run* runs, int64_t count) {
    const int64_t tasks_wanted = workers.threads > 1 ? 2 * workers.threads : 1;
    const int64_t parts = std::max<int64_t>(1, tasks_wanted / std::max<int64_t>(1, count * c.shape.heads));
    std::vector<Task> tasks;
    for (int64_t i = 0; i < count; ++i)
        for (int64_t head = 0; head < c.shape.heads; ++head)
            for (int64_t part = parts; part-- > 0;) /* the last rows see most */
                if (runs[i].rows * part / parts < runs[i].rows * (part + 1) / parts)
                    tasks.push_back({runs + i, head, runs[i].rows * part / parts, runs[i].rows * (part + 1) / parts});
    const auto run = expanded(c.weights.format);
    parallel(workers, tasks.size(), [&](int64_t i, int) { run(c, tasks[i]); });
}

}  // namespace gnomon::attention
