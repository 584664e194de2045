/* Routed experts on packed weights. The pairs (token, slot) are sorted by expert; an expert's pairs are cut into parts of at most ROW_BLOCK
 * rows, and a part goes through gate, up, SiTU and down on one thread, its intermediate in that thread's cache. Where there are fewer parts
 * than threads can share, all intermediates are computed first, group by group of outputs, then all outputs. Either way a pair's numbers
 * are the same. */
#include <algorithm>
#include <cstring>
#include <vector>

#include "lanes.h"
#include "matrix_work.h"
#include "situ.h"

namespace gnomon {

namespace {

const int64_t SLAB = 2048;      /* tokens at a time: bounds the memory for the outputs of their experts */
const int64_t BUFFER = 1 << 14; /* values of gate, and of up, between a product and its activation: in the first-level cache */

struct Part {
    int64_t expert, first, last; /* sorted pairs */
};

/* y = sum of `count` rows of `width` floats, each times its weight, in order. */
struct Mixture {
    const float* const* rows;
    const float* weights;
    int64_t count, width;
    float* y;
};

template <int W>
INLINE void mix_body(const Mixture& m) {
    for (int64_t i = 0; i < m.width; i += W) {
        const int64_t left = std::min<int64_t>(W, m.width - i);
        vec<W> total = {};
        for (int64_t j = 0; j < m.count; ++j) total += m.weights[j] * load_some<W>(m.rows[j] + i, left);
        store_some<W>(m.y + i, left, total);
    }
}

DISPATCH(mix, (const Mixture& m), (m))

/* One slab of tokens and the memory of its pairs. */
struct Slab {
    const Experts& e;
    Inputs z;
    int64_t latent, inner, rows, k, threads;
    std::vector<Part> parts;
    std::vector<int32_t> token, place; /* of a sorted pair; the sorted position of a pair */
    float* out;                        /* [sorted pair][latent] */
    bool mxfp8;

    bool plain() const { return e.gate[0].format == F32; }
    int64_t value_bytes() const { return plain() ? 4 : kernels().input_bytes; }
    int64_t hidden_stride() const { return rounded_stride(inner); }
    Inputs inputs(const char* rows_of, int64_t stride) const {
        return {reinterpret_cast<const float*>(rows_of), stride, rows_of, stride};
    }

    void sort(const int32_t* ids) {
        const int64_t pairs = rows * k;
        std::vector<int64_t> next(e.count + 1, 0);
        for (int64_t i = 0; i < pairs; ++i) ++next[ids[i] + 1];
        for (int64_t expert = 0; expert < e.count; ++expert) {
            const int64_t first = next[expert], last = next[expert + 1] += first, tiles = (last - first + ROW_BLOCK - 1) / ROW_BLOCK;
            for (int64_t i = 0; i < tiles; ++i)
                parts.push_back({expert, first + i * (last - first) / tiles, first + (i + 1) * (last - first) / tiles});
        }
        token.resize(pairs);
        place.resize(pairs);
        for (int64_t i = 0; i < pairs; ++i) {
            const int64_t at = next[ids[i]]++;
            token[at] = static_cast<int32_t>(i / k);
            place[i] = static_cast<int32_t>(at);
        }
    }

    /* Rows of z of a part, one after another. */
    Inputs gather(const Part& part) const {
        const int64_t stride = plain() ? latent : z.rounded_stride, bytes = stride * value_bytes();
        const int64_t from_bytes = (plain() ? z.plain_stride : z.rounded_stride) * value_bytes();
        const char* from = plain() ? reinterpret_cast<const char*>(z.plain) : static_cast<const char*>(z.rounded);
        char* to = scratch(GATHERED).get((part.last - part.first) * bytes);
        for (int64_t i = part.first; i < part.last; ++i) std::memcpy(to + (i - part.first) * bytes, from + token[i] * from_bytes, bytes);
        return inputs(to, stride);
    }

    /* Groups [first, last) of the part's intermediate, rounded, into `hidden` (the part's rows). */
    void activate_part(const Part& part, int64_t first, int64_t last, char* hidden) const {
        const int64_t n = part.last - part.first, step = std::max<int64_t>(1, BUFFER / (n * GROUP)), width = step * GROUP;
        const Inputs x = gather(part);
        float* gate = reinterpret_cast<float*>(scratch(BRANCHES).get(2 * n * width * 4));
        float* up = gate + n * width;
        for (int64_t group = first; group < last; group += step) {
            const int64_t end = std::min(group + step, last), at = group * GROUP, count = std::min(end * GROUP, inner) - at;
            multiply_groups(e.gate[part.expert], group, end, x, n, gate, width, false);
            multiply_groups(e.up[part.expert], group, end, x, n, up, width, false);
            for (int64_t row = 0; row < n; ++row) {
                float* a = gate + row * width;
                situ(a, up + row * width, count, e.beta1, e.beta2, a);
                if (mxfp8) gnomon_mxfp_round(a, count / BLOCK, 8, 0, a, 1);
                char* to = hidden + (row * hidden_stride() + at) * value_bytes();
                if (plain()) std::memcpy(to, a, count * sizeof(float));
                else kernels().prepare(a, count, to);
            }
        }
    }

    void project_part(const Part& part, int64_t first, int64_t last, const char* hidden) const {
        const Inputs x = inputs(hidden, hidden_stride());
        float* y = out + part.first * latent + first * GROUP;
        multiply_groups(e.down[part.expert], first, last, x, part.last - part.first, y, latent, false);
    }

    void run_whole_parts(Pool& pool) const {
        const int64_t groups = (inner + GROUP - 1) / GROUP, outputs = (latent + GROUP - 1) / GROUP;
        parallel(pool, static_cast<int64_t>(parts.size()), [&](int64_t i, int) {
            char* hidden = scratch(HIDDEN).get((parts[i].last - parts[i].first) * hidden_stride() * value_bytes());
            activate_part(parts[i], 0, groups, hidden);
            project_part(parts[i], 0, outputs, hidden);
        });
    }

    void run_by_groups(Pool& pool) const {
        const int64_t groups = (inner + GROUP - 1) / GROUP, outputs = (latent + GROUP - 1) / GROUP;
        const int64_t bytes = hidden_stride() * value_bytes();
        char* hidden = scratch(HIDDEN).get(rows * k * bytes);
        parallel(pool, static_cast<int64_t>(parts.size()) * groups, [&](int64_t i, int) {
            const Part& part = parts[i / groups];
            activate_part(part, i % groups, i % groups + 1, hidden + part.first * bytes);
        });
        parallel(pool, static_cast<int64_t>(parts.size()) * outputs, [&](int64_t i, int) {
            const Part& part = parts[i / outputs];
            project_part(part, i % outputs, i % outputs + 1, hidden + part.first * bytes);
        });
    }

    void combine(Pool& pool, const float* weights, float* y) const {
        const int64_t step = std::max<int64_t>(1, BUFFER * 4 / (k * latent + 1)); /* tokens of one task */
        parallel(pool, (rows + step - 1) / step, [&](int64_t task, int) {
            std::vector<const float*> chosen(k);
            for (int64_t row = task * step; row < std::min(rows, (task + 1) * step); ++row) {
                for (int64_t j = 0; j < k; ++j) chosen[j] = out + place[row * k + j] * latent;
                mix({chosen.data(), weights + row * k, k, latent, y + row * latent});
            }
        });
    }
};

}  // namespace

void experts(Pool& pool, const Experts& e, const float* z, const int32_t* ids, const float* weights, int64_t rows, int64_t k, float* y,
             bool mxfp8) {
    if (e.count == 0 || rows == 0) return;
    const int64_t latent = e.gate[0].in, inner = e.gate[0].out;
    for (int64_t first = 0; first < rows; first += SLAB) {
        const int64_t count = std::min(SLAB, rows - first);
        Slab slab{e, {}, latent, inner, count, k, pool.threads, {}, {}, {}, nullptr, mxfp8};
        const float* inputs = z + first * latent;
        if (mxfp8) {
            float* coarse = reinterpret_cast<float*>(scratch(COARSE).get(count * latent * 4));
            gnomon_mxfp_round(inputs, count * latent / BLOCK, 8, 0, coarse, pool.threads);
            inputs = coarse;
        }
        slab.z = prepare(pool, inputs, count, latent, latent, !slab.plain(), scratch(INPUTS));
        slab.sort(ids + first * k);
        slab.out = reinterpret_cast<float*>(scratch(OUTPUTS).get(count * k * latent * 4));
        if (static_cast<int64_t>(slab.parts.size()) >= 4 * pool.threads || pool.threads == 1) slab.run_whole_parts(pool);
        else slab.run_by_groups(pool);
        slab.combine(pool, weights + first * k, y + first * latent);
    }
}

}  // namespace gnomon

extern "C" void gnomon_experts_forward(const gnomon_experts* experts, const float* z, const int32_t* ids, const float* weights,
                                       int64_t rows, int64_t k, int32_t mxfp8, float* y, int64_t* refused, int32_t threads) {
    *refused = -1;
    for (int64_t i = 0; i < rows * k && *refused < 0; ++i)
        if (ids[i] < 0 || ids[i] >= experts->count) *refused = i;
    if (*refused >= 0) return;
    gnomon::experts(gnomon::pool(threads), *experts, z, ids, weights, rows, k, y, mxfp8 != 0);
}
