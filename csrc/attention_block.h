/* What both forms of latent attention share: a block of cached rows as operands, and a step of the online softmax. */
#pragma once

#include <algorithm>
#include <cmath>

#include "attention.h"
#include "attention_tile.h"

namespace gnomon::attention {

const int64_t KEYS = 64; /* of one block; blocks begin at multiples of it */
const int64_t KEY_PANELS = KEYS / PANEL;

/* Sizes in words and panels; `latent` and `rope` are padded to whole words each. */
struct Sizes {
    int64_t latent, rope, nope, row, keys, latent_panels, nope_panels, value_panels;
    Sizes(const LatentShape& s, int64_t in_a_word)
        : latent(words_for(s.latent, in_a_word)), rope(words_for(s.rope, in_a_word)), nope(words_for(s.nope, in_a_word)),
          row(latent + rope), keys(words_for(KEYS, in_a_word)), latent_panels(panels_for(s.latent)), nope_panels(panels_for(s.nope)),
          value_panels(panels_for(s.value)) {}
};

/* Packed kv_b of one head: [absorb | keys | values], each whole:
 *   absorb: panels of latents, words along the key part (a query's key part times this is its query on the latent);
 *   keys: the key half row by row, words along the latent; values: panels of values, words along the latent. */
struct HeadWeights {
    const word *absorb, *keys, *values;
    HeadWeights(const LatentShape& s, const Sizes& z, const void* packed, int64_t head) {
        const int64_t a = z.latent_panels * z.nope * PANEL, k = s.nope * z.latent, v = z.value_panels * z.latent * PANEL;
        absorb = static_cast<const word*>(packed) + head * (a + k + v);
        keys = absorb + a;
        values = keys + k;
    }
};

/* Everything a call of latent_attention was given. */
struct Call {
    const LatentShape& shape;
    const LatentWeights& weights;
    const LatentPages& pages;
    const LatentBatch& batch;
    const float* q;
    float* out;
    Multiply multiply;
    const float* query(int64_t token, int64_t head) const { return q + (token * shape.heads + head) * (shape.nope + shape.rope); }
    float* result(int64_t token, int64_t head) const { return out + (token * shape.heads + head) * shape.value; }
};

/* New tokens of one sequence: `rows` of the stream from row `token` on; the first of them sees `seen` cached rows, itself among them. */
struct Run {
    int64_t sequence, token, rows, seen;
};

/* Each form for the runs that chose it. */
void attend_absorbed(Pool&, const Call&, const Run* runs, int64_t count);
void attend_expanded(Pool&, const Call&, const Run* runs, int64_t count);

inline const void* cached_row(const LatentShape& s, const LatentPages& pages, const LatentBatch& b, int64_t sequence, int64_t position) {
    const int64_t page = b.table[sequence * b.table_width + position / pages.page_tokens];
    const int64_t row = page * pages.page_rows + position % pages.page_tokens;
    return static_cast<const char*>(pages.rows) + row * (s.latent + s.rope) * (pages.format == F32 ? 4 : 2);
}

/* Rows first to first + count of a sequence, as elements: [KEYS][z.row] words, rows beyond `count` zero. */
template <int F>
INLINE void stage(const LatentShape& s, const Sizes& z, const LatentPages& pages, const LatentBatch& b, int64_t sequence, int64_t first,
                  int64_t count, word* rows) {
    const int64_t latent = z.latent * per_word<F>, rope = z.rope * per_word<F>;
    for (int64_t i = 0; i < count; ++i) {
        element<F>* out = reinterpret_cast<element<F>*>(rows + i * z.row);
        const void* from = cached_row(s, pages, b, sequence, first + i);
        if (pages.format == F32) {
            copy_row(static_cast<const float*>(from), s.latent, latent, out);
            copy_row(static_cast<const float*>(from) + s.latent, s.rope, rope, out + latent);
        } else {
            copy_row(static_cast<const uint16_t*>(from), s.latent, latent, out);
            copy_row(static_cast<const uint16_t*>(from) + s.latent, s.rope, rope, out + latent);
        }
    }
    std::memset(rows + count * z.row, 0, static_cast<size_t>((KEYS - count) * z.row) * sizeof(word));
}

/* Weights of one block for one query row: scores [KEYS], of which the first `seen` count, become exponentials below the row's largest score
 * so far. `p` receives them as words, zeros where nothing is seen; keep becomes the factor of everything before. */
template <int W, int F>
INLINE void soften(float* scores, int64_t seen, float scale, float* largest, float* total, float* keep, word* p) {
    for (int64_t i = seen; i < KEYS; ++i) scores[i] = -INFINITY;
    vec<W> top = vec<W>{} - INFINITY;
    for (int64_t i = 0; i < KEYS; i += W) {
        const vec<W> x = load<W>(scores + i) * scale;
        store<W>(scores + i, x);
        top = x > top ? x : top;
    }
    float most = *largest;
    for (int i = 0; i < W; ++i) most = std::max(most, top[i]);
    const float factor = std::exp(*largest - most);
    vec<W> sum_of = {};
    for (int64_t i = 0; i < KEYS; i += W) {
        vec<W> x = exponential<W>(load<W>(scores + i) - most);
        if constexpr (F == SINGLE) {
            store<W>(reinterpret_cast<float*>(p) + i, x);
        } else {
            uint16_t* out = reinterpret_cast<uint16_t*>(p) + i;
            for (int j = 0; j < W; ++j) out[j] = narrow(x[j]);
            for (int j = 0; j < W; ++j) x[j] = widen(out[j]); /* the sum of what is multiplied */
        }
        sum_of += x;
    }
    *total = *total * factor + sum<W>(sum_of);
    *keep = factor;
    *largest = most;
}

}  // namespace gnomon::attention
