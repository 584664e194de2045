/* Latent attention in absorbed form: queries meet the cached rows themselves, so each row is read once for all heads and new tokens of its
 * sequence. Three steps: queries take over the key half of kv_b; spans of keys are attended to, independently of each other; their results
 * are joined in order and the value half acts on them. Blocks and spans lie on a fixed grid of positions, so a row's bits are its own.
 */
#include <vector>

#include "attention_block.h"

namespace gnomon::attention {
namespace {

const int64_t SPAN = 512;          /* keys of a span at the start of a sequence … */
const int64_t SPANS = 16;          /* … and after so many of one length the next ones are twice as long */
const int64_t MOST_QUERIES = 256;  /* heads times tokens that share a pass over the keys */
const int64_t WEIGHT_ROWS = 48;    /* tokens of one task over a head's weights */
const int64_t ROOM = 64 << 20;     /* bytes of queries and results over spans that stand in memory at once; more tokens take rounds */

/* Some tokens and heads of one run, with their results over each span. */
struct Piece {
    const Run* run;
    int64_t row, rows, heads, head; /* rows from `row` of all absorbed ones on; they see `seen`, seen + 1, … keys */
    int64_t seen, spans, partial;   /* where the partial results begin: [spans][rows * heads] of each array */
};

struct Span {
    int64_t piece, begin, end, index;
};

/* All tokens in absorbed form. Queries stand as [group of heads][row][heads of a group]. */
struct Work {
    const Call& call;
    const Sizes z;
    int64_t rows, group;
    std::vector<int64_t> tokens, piece_of; /* of each row: its row of the stream, and its first piece (of group 0; groups follow) */
    std::vector<Piece> pieces;
    std::vector<Span> spans;
    int64_t partials = 0;

    int64_t context_width() const { return z.latent_panels * PANEL; }
    int64_t query_at(int64_t row, int64_t head) const { return (head / group * rows + row) * group + head % group; }
};

struct Partials {
    Scratch<float> largest, total, context;
    Partials(const Work& w) : largest(w.partials), total(w.partials), context(w.partials * w.context_width()) {}
};

/* Calls f(begin, end, index) for the spans that cover `keys` keys. */
template <class F>
int64_t for_each_span(int64_t keys, F&& f) {
    int64_t index = 0, length = SPAN, begin = 0;
    while (begin < keys) {
        f(begin, std::min(keys, begin + length), index);
        begin += length;
        if (++index % SPANS == 0) length *= 2;
    }
    return index;
}

/* The largest divisor of `heads` that is less than `above` and at least 4, or 0. */
int64_t smaller_group(int64_t heads, int64_t above) {
    for (int64_t group = above - 1; group >= 4; --group)
        if (heads % group == 0) return group;
    return 0;
}

void cut(Work& w, const Run* runs, int64_t count) {
    w.pieces.clear(), w.spans.clear(), w.piece_of.clear(), w.partials = 0;
    const int64_t most = std::max<int64_t>(1, MOST_QUERIES / w.group), heads = w.call.shape.heads;
    int64_t row = 0;
    for (int64_t i = 0; i < count; ++i) {
        for (int64_t done = 0; done < runs[i].rows; done += most) {
            const int64_t rows = std::min(most, runs[i].rows - done), seen = runs[i].seen + done;
            w.piece_of.insert(w.piece_of.end(), rows, static_cast<int64_t>(w.pieces.size()));
            for (int64_t head = 0; head < heads; head += w.group) {
                const int64_t piece = w.pieces.size();
                const int64_t spans = for_each_span(seen + rows - 1, [&](int64_t begin, int64_t end, int64_t index) {
                    w.spans.push_back({piece, begin, end, index});
                });
                w.pieces.push_back({runs + i, row, rows, w.group, head, seen, spans, w.partials});
                w.partials += spans * rows * w.group;
            }
            row += rows;
        }
    }
    std::stable_sort(w.spans.begin(), w.spans.end(), [](const Span& a, const Span& b) { return a.end - a.begin > b.end - b.begin; });
}

/* Queries on the latent of some rows and one head. */
template <int W, int F>
INLINE void absorb_body(const Work& w, int64_t head, int64_t first, int64_t last, word* queries) {
    const LatentShape& s = w.call.shape;
    const Sizes& z = w.z;
    const HeadWeights weights(s, z, w.call.weights.packed, head);
    const int64_t rows = last - first, width = w.context_width();
    const Scratch<word> a(rows * z.nope);
    const Scratch<float> c(rows * width);
    for (int64_t i = 0; i < rows; ++i)
        copy_row(w.call.query(w.tokens[first + i], head), s.nope, z.nope * per_word<F>, reinterpret_cast<element<F>*>(a + i * z.nope));
    w.call.multiply({a, z.nope, weights.absorb, z.nope, z.nope, z.latent_panels, c, width, nullptr}, rows);
    for (int64_t i = 0; i < rows; ++i) {
        element<F>* out = reinterpret_cast<element<F>*>(queries + w.query_at(first + i, head) * z.row);
        copy_row(c + i * width, s.latent, z.latent * per_word<F>, out);
        copy_row(w.call.query(w.tokens[first + i], head) + s.nope, s.rope, z.rope * per_word<F>, out + z.latent * per_word<F>);
    }
}

/* One span of keys for the queries of one piece. */
template <int W, int F>
INLINE void attend_body(const Work& w, const Span& span, const word* queries, const Partials& out) {
    const Call& call = w.call;
    const Sizes& z = w.z;
    const Piece& piece = w.pieces[span.piece];
    const int64_t count = piece.rows * piece.heads, width = w.context_width(), at = piece.partial + span.index * count;
    const word* q = queries + w.query_at(piece.row, piece.head) * z.row;
    float *largest = out.largest + at, *total = out.total + at, *context = out.context + at * width;
    const Scratch<word> rows(KEYS * z.row), keys(KEYS * z.row), values(z.latent_panels * PANEL * z.keys), p(count * z.keys);
    const Scratch<float> scores(count * KEYS), keep(count);
    std::fill_n(largest, count, -INFINITY);
    std::fill_n(total, count, 0.0f);
    std::memset(context, 0, count * width * sizeof(float));
    for (int64_t key = span.begin; key < span.end; key += KEYS) {
        const int64_t here = std::min(KEYS, span.end - key), panels = panels_for(here), words = words_for(here, per_word<F>);
        const int64_t first = std::max<int64_t>(0, key - piece.seen + 1) * piece.heads; /* earlier tokens see none of these */
        stage<F>(call.shape, z, call.pages, call.batch, piece.run->sequence, key, here, rows);
        for (int64_t panel = 0; panel < panels; ++panel)
            transpose_panel<W>(rows + panel * PANEL * z.row, z.row, z.row, keys + panel * z.row * PANEL);
        for (int64_t i = 0; i < words; ++i) {
            const word* row = rows + i * per_word<F> * z.row;
            weave<F>(reinterpret_cast<const element<F>*>(row), reinterpret_cast<const element<F>*>(row + z.row), call.shape.latent, z.keys,
                     i, values);
        }
        call.multiply({q + first * z.row, z.row, keys, z.row, z.row, panels, scores + first * KEYS, KEYS, nullptr}, count - first);
        for (int64_t i = first; i < count; ++i)
            soften<W, F>(scores + i * KEYS, std::min(here, piece.seen + i / piece.heads - key), call.shape.scale, largest + i, total + i,
                         keep + i, p + i * z.keys);
        call.multiply({p + first * z.keys, z.keys, values, z.keys, words, z.latent_panels, context + first * width, width, keep + first},
                            count - first);
    }
}

/* Joins the spans of one row and head, in order: elements of its context. */
template <int F>
INLINE void join(const Work& w, int64_t row, int64_t head, const Partials& parts, float* sum, element<F>* out) {
    const Piece& piece = w.pieces[w.piece_of[row] + head / w.group];
    const int64_t count = piece.rows * piece.heads, own = (row - piece.row) * piece.heads + head - piece.head, width = w.context_width();
    const int64_t seen = piece.seen + row - piece.row;
    float most = -INFINITY, total = 0.0f;
    const int64_t spans = for_each_span(seen, [&](int64_t, int64_t, int64_t i) {
        const float here = parts.largest[piece.partial + i * count + own];
        most = here > most ? here : most;
    });
    std::fill_n(sum, width, 0.0f);
    for (int64_t i = 0; i < spans; ++i) {
        const int64_t at = piece.partial + i * count + own;
        const float factor = std::exp(parts.largest[at] - most);
        const float* context = parts.context + at * width;
        total += factor * parts.total[at];
        for (int64_t c = 0; c < width; ++c) sum[c] += factor * context[c];
    }
    for (int64_t c = 0; c < width; ++c) sum[c] /= total;
    copy_row(sum, w.call.shape.latent, w.z.latent * per_word<F>, out);
}

/* Outputs of some rows and one head. */
template <int W, int F>
INLINE void finish_body(const Work& w, int64_t head, int64_t first, int64_t last, const Partials& parts) {
    const Sizes& z = w.z;
    const HeadWeights weights(w.call.shape, z, w.call.weights.packed, head);
    const int64_t rows = last - first, value = z.value_panels * PANEL;
    const Scratch<word> a(rows * z.latent);
    const Scratch<float> sum(w.context_width()), c(rows * value);
    for (int64_t i = 0; i < rows; ++i) join<F>(w, first + i, head, parts, sum, reinterpret_cast<element<F>*>(a + i * z.latent));
    w.call.multiply({a, z.latent, weights.values, z.latent, z.latent, z.value_panels, c, value, nullptr}, rows);
    for (int64_t i = 0; i < rows; ++i) std::copy_n(c + i * value, w.call.shape.value, w.call.result(w.tokens[first + i], head));
}

DISPATCH_OPERANDS(absorb, (const Work& w, int64_t head, int64_t first, int64_t last, word* queries), (w, head, first, last, queries))
DISPATCH_OPERANDS(attend, (const Work& w, const Span& span, const word* queries, const Partials& out), (w, span, queries, out))
DISPATCH_OPERANDS(finish, (const Work& w, int64_t head, int64_t first, int64_t last, const Partials& p), (w, head, first, last, p))

/* All steps for the tokens of one round. */
void attend_round(Pool& workers, const Call& call, const Run* runs, int64_t count) {
    const int32_t format = call.weights.format;
    const int64_t heads = call.shape.heads;
    Work w{call, Sizes(call.shape, format == F32 ? 1 : 2), 0, heads, {}, {}, {}, {}};
    for (int64_t i = 0; i < count; ++i)
        for (int64_t t = 0; t < runs[i].rows; ++t) w.tokens.push_back(runs[i].token + t);
    w.rows = w.tokens.size();
    cut(w, runs, count);
    while (static_cast<int64_t>(w.spans.size()) < workers.threads) {
        const int64_t group = smaller_group(heads, w.group);
        if (group == 0) break;
        w.group = group;
        cut(w, runs, count);
    }
    const Scratch<word> queries(heads * w.rows * w.z.row);
    const Partials partials(w);
    const int64_t parts = (w.rows + WEIGHT_ROWS - 1) / WEIGHT_ROWS;
    const auto absorb_rows = absorb(format);
    const auto attend_span = attend(format);
    const auto finish_rows = finish(format);
    const auto last = [&](int64_t part) { return std::min(w.rows, (part + 1) * WEIGHT_ROWS); };
    parallel(workers, heads * parts, [&](int64_t i, int) {
        absorb_rows(w, i / parts, i % parts * WEIGHT_ROWS, last(i % parts), queries);
    });
    parallel(workers, w.spans.size(), [&](int64_t i, int) { attend_span(w, w.spans[i], queries, partials); });
    parallel(workers, heads * parts, [&](int64_t i, int) {
        finish_rows(w, i / parts, i % parts * WEIGHT_ROWS, last(i % parts), partials);
    });
}

/* Bytes that a round needs for a token that sees `keys` keys. */
int64_t bytes_for(const LatentShape& s, const Sizes& z, int64_t keys) {
    const int64_t spans = for_each_span(keys, [](int64_t, int64_t, int64_t) {}), result = 2 + z.latent_panels * PANEL;
    return s.heads * (z.row * static_cast<int64_t>(sizeof(word)) + spans * result * static_cast<int64_t>(sizeof(float)));
}

}  // namespace

void attend_absorbed(Pool& workers, const Call& call, const Run* runs, int64_t count) {
    const Sizes z(call.shape, call.weights.format == F32 ? 1 : 2);
    const int64_t most = std::max<int64_t>(1, MOST_QUERIES / call.shape.heads); /* tokens that share a pass over the keys stay together */
    std::vector<Run> round;
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; ++i) {
        for (int64_t done = 0; done < runs[i].rows; done += most) {
            const int64_t rows = std::min(most, runs[i].rows - done), seen = runs[i].seen + done;
            const int64_t more = rows * bytes_for(call.shape, z, seen + rows - 1);
            if (!round.empty() && bytes + more > ROOM) {
                attend_round(workers, call, round.data(), round.size());
                round.clear(), bytes = 0;
            }
            if (!round.empty() && round.back().sequence == runs[i].sequence) round.back().rows += rows;
            else round.push_back({runs[i].sequence, runs[i].token + done, rows, seen});
            bytes += more;
        }
    }
    if (!round.empty()) attend_round(workers, call, round.data(), round.size());
}

}  // namespace gnomon::attention
