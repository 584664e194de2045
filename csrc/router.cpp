/* The router: sigmoid, choice of the largest biased scores, weights. What each function computes stands in router.h and gnomon.h. */
#include "router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "lanes.h"

namespace {

using gnomon::Choice;

const float TINY = 1e-20f; /* added to the sum of chosen scores, as the released router does */
const float LOWEST = -std::numeric_limits<float>::infinity();

template <int W>
INLINE void sigmoids_body(const float* logits, int64_t count, float* scores) {
    for (int64_t i = 0; i < count; i += W) {
        const int64_t left = std::min<int64_t>(W, count - i);
        store_some<W>(scores + i, left, sigmoid<W>(load_some<W>(logits + i, left)));
    }
}

DISPATCH(sigmoids, (const float* logits, int64_t count, float* scores), (logits, count, scores))

/* The `wanted` largest of values [count], largest first, of equal ones the lowest index first; indices and values into best. */
void largest(const float* values, int64_t count, int64_t wanted, int32_t* index, float* best) {
    for (int64_t i = 0; i < count; ++i) {
        if (i >= wanted && !(values[i] > best[wanted - 1])) continue;
        int64_t at = std::min(i, wanted - 1);
        for (; at > 0 && values[i] > best[at - 1]; --at) best[at] = best[at - 1], index[at] = index[at - 1];
        best[at] = values[i], index[at] = static_cast<int32_t>(i);
    }
}

/* Minus infinity for every expert of a group that is not among the strongest. */
void drop_weak_groups(const Choice& c, float* biased) {
    const int64_t size = c.experts / c.groups, two = std::min<int64_t>(2, size);
    std::vector<float> strength(c.groups), best(std::max(two, c.kept_groups));
    std::vector<int32_t> kept(std::max(two, c.kept_groups));
    for (int64_t group = 0; group < c.groups; ++group) {
        largest(biased + group * size, size, two, kept.data(), best.data());
        strength[group] = two == 2 ? best[0] + best[1] : best[0];
    }
    largest(strength.data(), c.groups, c.kept_groups, kept.data(), best.data());
    for (int64_t group = 0; group < c.groups; ++group)
        if (std::find(kept.begin(), kept.begin() + c.kept_groups, group) == kept.begin() + c.kept_groups)
            std::fill_n(biased + group * size, size, LOWEST);
}

/* Scratch of one thread: it grows to the largest router seen. */
struct Row {
    std::vector<float> scores, biased, best;
    std::vector<int32_t> index;
    explicit Row(const Choice& c) : scores(c.experts), biased(c.experts), best(c.k + 1), index(c.k + 1) {}

    /* Scores of one row, and its `k + 1` largest biased ones; k where there are no more experts. */
    void choose(const Choice& c, const float* logits, const float* bias) {
        sigmoids(logits, c.experts, scores.data());
        for (int64_t e = 0; e < c.experts; ++e) {
            const float value = scores[e] + bias[e];
            biased[e] = std::isnan(value) ? -LOWEST : value;
        }
        if (c.groups > 1) drop_weak_groups(c, biased.data());
        largest(biased.data(), c.experts, std::min(c.k + 1, c.experts), index.data(), best.data());
    }

    void weigh(const Choice& c, float* weights) const {
        float sum = 0.0f;
        for (int64_t j = 0; j < c.k; ++j) sum += weights[j] = scores[index[j]];
        const float factor = c.renormalise ? c.scaling / (sum + TINY) : c.scaling;
        for (int64_t j = 0; j < c.k; ++j) weights[j] *= factor;
    }
};

}  // namespace

void gnomon::route(Pool&, const Choice& choice, const float* logits, int64_t rows, const float* bias, int32_t* ids, float* weights) {
    Row row(choice);
    for (int64_t r = 0; r < rows; ++r) {
        row.choose(choice, logits + r * choice.experts, bias);
        std::copy_n(row.index.data(), choice.k, ids + r * choice.k);
        row.weigh(choice, weights + r * choice.k);
    }
}
