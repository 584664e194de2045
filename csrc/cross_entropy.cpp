/* Cross-entropy of a head's logits with its gradients (report section 3). What the function computes stands in training.h.
 *
 * Logits exist for one chunk of rows. A thread makes the logits of a tile, turns them into slopes in place and multiplies those back into
 * the gradient of the hidden states, all while the tile is in cache; the gradient of the weight then takes the whole chunk. Rows of logits
 * stand an odd number of cache lines apart, since a vocabulary is a power of two and its columns would all fall into the same sets.
 */
#include <algorithm>
#include <cmath>
#include <memory>

#include "gnomon.h"
#include "lanes.h"
#include "product.h"

namespace {

using namespace gnomon;

const int64_t TILE = 48;           /* rows taken through both products together: a multiple of the kernel's six */
const int64_t LOGITS = 1 << 20;    /* of one chunk */
const int64_t LEAST_ROWS = 4 * TILE;
const int64_t WORDS = 48;          /* rows of the weight in one task of its gradient */
const int64_t LINE = 16;           /* floats of a cache line */

/* The loss of one row in nats; logits become softmax minus one at the target. */
template <int W>
INLINE void row_body(float* logits, int64_t width, int64_t target, double* loss) {
    float largest = logits[0];
    {
        vec<W> most = load_some<W>(logits, std::min<int64_t>(W, width));
        for (int64_t i = W; i + W <= width; i += W) {
            const vec<W> x = load<W>(logits + i);
            most = x > most ? x : most;
        }
        for (int j = 0; j < std::min<int64_t>(W, width); ++j) largest = std::max(largest, most[j]);
        for (int64_t i = width / W * W; i < width; ++i) largest = std::max(largest, logits[i]);
    }
    const float own = logits[target];
    vec<W> partial = {};
    for (int64_t i = 0; i < width; i += W) {
        const int64_t left = std::min<int64_t>(W, width - i);
        const vec<W> e = exponential<W>(load_some<W>(logits + i, left) - largest);
        store_some<W>(logits + i, left, e);
        if (left == W) partial += e;
    }
    float total = sum<W>(partial);
    for (int64_t i = width / W * W; i < width; ++i) total += logits[i];
    *loss = std::log(static_cast<double>(total)) - (static_cast<double>(own) - largest);
    const float factor = 1.0f / total;
    for (int64_t i = 0; i < width; i += W) {
        const int64_t left = std::min<int64_t>(W, width - i);
        store_some<W>(logits + i, left, load_some<W>(logits + i, left) * factor);
    }
    logits[target] -= 1.0f;
}

DISPATCH(row, (float* logits, int64_t width, int64_t target, double* loss), (logits, width, target, loss))

int64_t rounded_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

}  // namespace

extern "C" void gnomon_cross_entropy(const float* hidden, const float* weight, const int64_t* targets, int64_t rows, int64_t width,
                                     int64_t words, double* losses, float* d_hidden, float* d_weight, int32_t threads) {
    const int64_t stride = rounded_up(words, LINE) / LINE % 2 ? rounded_up(words, LINE) : rounded_up(words, LINE) + LINE;
    const int64_t chunk = std::min(rounded_up(std::max(LEAST_ROWS, LOGITS / words), LEAST_ROWS), rounded_up(rows, TILE));
    const auto floats = [](int64_t count) { return std::unique_ptr<float[]>(new float[count]); };
    const auto logits = floats(chunk * stride), forward = floats(packed_size(width, words));
    const auto backward = floats(d_hidden ? packed_size(words, width) : 0), packed = floats(d_weight ? packed_size(chunk, width) : 0);
    if (d_weight && !rows) std::fill_n(d_weight, words * width, 0.0f);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static) nowait
        for (int64_t word = 0; word < words; word += STRIPE)
            pack_transposed(weight + word * width, width, width, std::min(STRIPE, words - word), forward.get() + word * width);
#pragma omp for schedule(static)
        for (int64_t column = 0; column < (d_hidden ? width : 0); column += STRIPE)
            pack(weight + column, width, words, std::min(STRIPE, width - column), backward.get() + column * words);
        for (int64_t start = 0; start < rows; start += chunk) {
            const int64_t count = std::min(chunk, rows - start);
#pragma omp for schedule(dynamic)
            for (int64_t first = 0; first < count; first += TILE) {
                const int64_t n = std::min(TILE, count - first);
                float* to = logits.get() + first * stride;
                multiply({hidden + (start + first) * width, width, forward.get(), to, stride, n, width, 0, words, false, false});
                for (int64_t i = 0; i < n; ++i) row(to + i * stride, words, targets[start + first + i], losses + start + first + i);
                if (d_hidden)
                    multiply({to, stride, backward.get(), d_hidden + (start + first) * width, width, n, words, 0, width, false, false});
            }
            if (!d_weight) continue;
#pragma omp for schedule(static)
            for (int64_t column = 0; column < width; column += STRIPE)
                pack(hidden + start * width + column, width, count, std::min(STRIPE, width - column), packed.get() + column * count);
#pragma omp for schedule(dynamic)
            for (int64_t word = 0; word < words; word += WORDS)
                multiply({logits.get() + word, stride, packed.get(), d_weight + word * width, width, std::min(WORDS, words - word), count,
                          0, width, true, start > 0});
        }
    }
}
