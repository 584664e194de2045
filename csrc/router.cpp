/* The router: sigmoid, choice of the largest biased scores, weights. What each function computes stands in router.h and gnomon.h. */
#include "router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "gnomon.h"
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

/* What choosing for one row needs, used again from row to row. */
struct Row {
    std::vector<float> scores, biased, best;
    std::vector<int32_t> index;
    explicit Row(const Choice& c) : scores(c.experts), biased(c.experts), best(c.k + 1), index(c.k + 1) {}

    /* The `k + 1` largest biased scores of one row; k where there are no more experts. */
    void choose(const Choice& c, const float* scores, const float* bias) {
        for (int64_t e = 0; e < c.experts; ++e) {
            const float value = scores[e] + bias[e];
            biased[e] = std::isnan(value) ? -LOWEST : value;
        }
        if (c.groups > 1) drop_weak_groups(c, biased.data());
        largest(biased.data(), c.experts, std::min(c.k + 1, c.experts), index.data(), best.data());
    }

    void weigh(const Choice& c, const float* scores, float* weights) const {
        float sum = 0.0f;
        for (int64_t j = 0; j < c.k; ++j) sum += weights[j] = scores[index[j]];
        for (int64_t j = 0; j < c.k; ++j) weights[j] = (c.renormalise ? weights[j] / (sum + TINY) : weights[j]) * c.scaling;
    }

    /* The (k+1)-th largest biased score; the smallest chosen where the kept groups have no other expert. */
    float cutoff(const Choice& c) const { return c.k < c.experts && best[c.k] != LOWEST ? best[c.k] : best[c.k - 1]; }
};

const int64_t ROWS = 64;   /* of one task */
const int64_t EXPERTS = 4; /* rows of the histogram in one task: counts of different experts never meet */

}  // namespace

void gnomon::route(Pool&, const Choice& choice, const float* logits, int64_t rows, const float* bias, int32_t* ids, float* weights) {
    Row row(choice);
    for (int64_t r = 0; r < rows; ++r) {
        sigmoids(logits + r * choice.experts, choice.experts, row.scores.data());
        row.choose(choice, row.scores.data(), bias);
        std::copy_n(row.index.data(), choice.k, ids + r * choice.k);
        row.weigh(choice, row.scores.data(), weights + r * choice.k);
    }
}

extern "C" void gnomon_route_forward(const float* scores, const float* bias, int64_t rows, int64_t experts, int64_t k, int64_t groups,
                                     int64_t kept_groups, int32_t renormalise, float scaling, int64_t* ids, float* weights, float* cutoff,
                                     int32_t threads) {
    const Choice c{experts, k, groups, kept_groups, renormalise != 0, scaling};
#pragma omp parallel num_threads(threads)
    {
        Row row(c);
#pragma omp for schedule(static)
        for (int64_t first = 0; first < rows; first += ROWS)
            for (int64_t r = first; r < std::min(first + ROWS, rows); ++r) {
                row.choose(c, scores + r * experts, bias);
                std::copy_n(row.index.data(), k, ids + r * k);
                row.weigh(c, scores + r * experts, weights + r * k);
                cutoff[r] = row.cutoff(c);
            }
    }
}

extern "C" void gnomon_route_backward(const float* scores, const int64_t* ids, const float* d_weights, int64_t rows, int64_t experts,
                                      int64_t k, int32_t renormalise, float scaling, float* d_scores, int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t first = 0; first < rows; first += ROWS)
        for (int64_t r = first; r < std::min(first + ROWS, rows); ++r) {
            const float *s = scores + r * experts, *d = d_weights + r * k;
            float *to = d_scores + r * experts, sum = TINY, inner = 0.0f;
            for (int64_t j = 0; j < k; ++j) sum += s[ids[r * k + j]], inner += d[j] * s[ids[r * k + j]];
            std::fill_n(to, experts, 0.0f);
            for (int64_t j = 0; j < k; ++j) to[ids[r * k + j]] = scaling * (renormalise ? (d[j] - inner / sum) / sum : d[j]);
        }
}

extern "C" void gnomon_required_bias_histogram(const float* scores, const float* cutoff, const uint8_t* mask, int64_t rows, int64_t experts,
                                               int64_t bins, double lowest, double width, int64_t* histogram, int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t first = 0; first < experts; first += EXPERTS) {
        const int64_t last = std::min(first + EXPERTS, experts);
        std::fill_n(histogram + first * bins, (last - first) * bins, 0);
        for (int64_t r = 0; r < rows; ++r) {
            if (mask && !mask[r]) continue;
            for (int64_t e = first; e < last; ++e) {
                const double place = (static_cast<double>(cutoff[r]) - scores[r * experts + e] - lowest) / width;
                ++histogram[e * bins + (place > 0.0 ? static_cast<int64_t>(std::min(place, bins - 1.0)) : 0)];
            }
        }
    }
}
