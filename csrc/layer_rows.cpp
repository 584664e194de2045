/* Row by row work of a layer (layer_rows.h), in lanes; rows are shared out among threads in tasks of a few thousand values. */
#include "layer_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "gnomon.h"
#include "lanes.h"

namespace gnomon {

namespace {

const int64_t TASK = 1 << 14; /* values of one task: below, waking a thread costs more than it saves */

/* f(first, last) over rows in tasks of about TASK values. */
template <class F>
void over_rows(Pool& pool, int64_t rows, int64_t width, F f) {
    const int64_t each = std::max<int64_t>(1, TASK / std::max<int64_t>(1, width)), tasks = (rows + each - 1) / each;
    if (tasks <= 1) {
        if (rows) f(0, rows);
        return;
    }
    parallel(pool, tasks, [&](int64_t task, int) { f(task * each, std::min(rows, (task + 1) * each)); });
}

template <int W>
INLINE void normalise_row_body(float* x, const float* weight, int64_t width, float eps) {
    vec<W> squares = {};
    for (int64_t i = 0; i < width; i += W) {
        const vec<W> v = load_some<W>(x + i, std::min<int64_t>(W, width - i));
        squares += v * v;
    }
    const float inverse = 1.0f / std::sqrt(sum<W>(squares) / static_cast<float>(width) + eps);
    for (int64_t i = 0; i < width; i += W) {
        const int64_t left = std::min<int64_t>(W, width - i);
        store_some<W>(x + i, left, load_some<W>(x + i, left) * inverse * load_some<W>(weight + i, left));
    }
}

template <int W>
INLINE void gate_values_body(float* x, const float* gate, int64_t count) {
    for (int64_t i = 0; i < count; i += W) {
        const int64_t left = std::min<int64_t>(W, count - i);
        store_some<W>(x + i, left, load_some<W>(x + i, left) * sigmoid<W>(load_some<W>(gate + i, left)));
    }
}

template <int W>
INLINE void add_values_body(const float* x, float* sum, int64_t count) {
    for (int64_t i = 0; i < count; i += W) {
        const int64_t left = std::min<int64_t>(W, count - i);
        store_some<W>(sum + i, left, load_some<W>(sum + i, left) + load_some<W>(x + i, left));
    }
}

DISPATCH(normalise_row, (float* x, const float* weight, int64_t width, float eps), (x, weight, width, eps))
DISPATCH(gate_values, (float* x, const float* gate, int64_t count), (x, gate, count))
DISPATCH(add_values, (const float* x, float* sum, int64_t count), (x, sum, count))

}  // namespace

void normalise(Pool& pool, float* x, const float* weight, int64_t rows, int64_t width, int64_t stride, float eps) {
    over_rows(pool, rows, width, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) normalise_row(x + row * stride, weight, width, eps);
    });
}

void gate_rows(Pool& pool, float* x, const float* gate, int64_t rows, int64_t width) {
    over_rows(pool, rows, width, [&](int64_t first, int64_t last) {
        gate_values(x + first * width, gate + first * width, (last - first) * width);
    });
}

void situ_rows(Pool& pool, float* gate, const float* up, int64_t rows, int64_t width, float beta1, float beta2) {
    over_rows(pool, rows, width, [&](int64_t first, int64_t last) {
        float* const part = gate + first * width;
        gnomon_situ_forward(part, up + first * width, last - first, width, beta1, beta2, part, 1);
    });
}

void add_rows(Pool& pool, const float* x, int64_t count, float* sum, bool add) {
    over_rows(pool, count, 1, [&](int64_t first, int64_t last) {
        if (add) add_values(x + first, sum + first, last - first);
        else std::memcpy(sum + first, x + first, (last - first) * sizeof(float));
    });
}

void look_up(const void* table, bool half, const int64_t* ids, int64_t rows, int64_t width, float* y) {
    for (int64_t row = 0; row < rows; ++row, y += width) {
        if (!half) {
            std::memcpy(y, static_cast<const float*>(table) + ids[row] * width, width * sizeof(float));
            continue;
        }
        const uint16_t* const from = static_cast<const uint16_t*>(table) + ids[row] * width;
        for (int64_t i = 0; i < width; ++i) {
            const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
            std::memcpy(y + i, &bits, sizeof bits);
        }
    }
}

}  // namespace gnomon
