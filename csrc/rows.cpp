/* Norms of rows: unit length for queries and keys, root mean square with a weight and, for KDA's output, a sigmoid gate.
 * What each function computes stands in gnomon.h. Rows are independent; the gradient of the weight is summed by blocks of rows, so that
 * the threads change no bit. */
#include <algorithm>
#include <vector>

#include "elements.h"
#include "gnomon.h"
#include "regions.h"
#include "rows.h"

namespace {

constexpr int64_t BLOCK = 256; /* rows of a task */

int64_t blocks_of(int64_t rows) { return (rows + BLOCK - 1) / BLOCK; }

template <class F>
void by_blocks(int threads, int64_t rows, F&& row) {
    each_task(threads, blocks_of(rows), [&](int64_t block, int) {
        for (int64_t r = block * BLOCK; r < std::min(rows, (block + 1) * BLOCK); ++r) row(r);
    });
}

bool bit(int32_t half, int place) { return (half >> place & 1) != 0; }

/* Rows of an array as fp32: where they stand, or converted into `room`. */
const float* row_of(const Input& x, int64_t at, int64_t width, float* room) {
    if (!x.half) return static_cast<const float*>(x.data) + at;
    x.row(at, width, room);
    return room;
}

/* Where a row of fp32 is written: in its place, or in `room` from where `put` takes it there. */
float* room_of(const Output& y, int64_t at, float* room) { return y.half ? room : static_cast<float*>(y.data) + at; }

void put(const Output& y, int64_t at, int64_t width, const float* row) {
    if (y.half) y.row(at, width, row);
}

float* scratch_of_thread(int64_t floats) {
    thread_local std::vector<float> memory;
    if (memory.size() < static_cast<size_t>(floats)) memory.resize(floats);
    return memory.data();
}

/* y = a x + b z */
template <int W>
INLINE void combine(float a, const float* x, float b, const float* z, int64_t n, float* y) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store<W>(y + i, a * load<W>(x + i) + b * load<W>(z + i));
    for (; i < n; ++i) y[i] = a * x[i] + b * z[i];
}

template <int W>
INLINE void unit_row_body(const float* x, const float* d_y, int64_t n, float eps, float scale, float* out) {
    const float inverse = 1.0f / std::sqrt(dot<W>(x, x, n) + eps);
    if (d_y) combine<W>(scale * inverse, d_y, -scale * inverse * inverse * inverse * dot<W>(x, d_y, n), x, n, out);
    else combine<W>(scale * inverse, x, 0.0f, x, n, out);
}
DISPATCH(unit_row, (const float* x, const float* d_y, int64_t n, float eps, float scale, float* out), (x, d_y, n, eps, scale, out))

DISPATCH(rms_row, (const float* x, const float* weight, const float* gate, int64_t n, float eps, float* y, bool coarse),
         (x, weight, gate, n, eps, y, coarse))

struct RmsGradients {
    const float *x, *weight, *gate, *d_y;
    float *d_x, *d_weight, *d_gate; /* d_weight is added to, the others are written */
};

/* With n = x r: d_n = d_y w s, d_x = r (d_n - n mean(d_n n)), d_w += d_y n s, d_gate = d_y n w s (1 - s). d_x holds d_n in between. */
template <int W>
INLINE void rms_row_back_body(const RmsGradients& a, int64_t n, float eps) {
    const float inverse = 1.0f / std::sqrt(dot<W>(a.x, a.x, n) / n + eps);
    const vec<W> one = vec<W>{} + 1.0f;
    vec<W> total = {};
    for (int64_t i = 0; i < n; i += W) {
        const int64_t width = n - i < W ? n - i : W;
        const vec<W> normal = load_some<W>(a.x + i, width) * inverse, weight = load_some<W>(a.weight + i, width);
        vec<W> d_y = load_some<W>(a.d_y + i, width);
        if (a.gate) {
            const vec<W> s = sigmoid<W>(load_some<W>(a.gate + i, width));
            d_y *= s;
            store_some<W>(a.d_gate + i, width, d_y * normal * weight * (one - s));
        }
        store_some<W>(a.d_weight + i, width, load_some<W>(a.d_weight + i, width) + d_y * normal);
        const vec<W> d_normal = d_y * weight;
        total += d_normal * normal;
        store_some<W>(a.d_x + i, width, d_normal);
    }
    combine<W>(inverse, a.d_x, -inverse * inverse * sum<W>(total) / n, a.x, n, a.d_x);
}
DISPATCH(rms_row_back, (const RmsGradients& a, int64_t n, float eps), (a, n, eps))

}  // namespace

extern "C" void gnomon_unit_forward(const void* x, int32_t half, int64_t rows, int64_t width, float eps, float scale, float* y,
                                    int32_t threads) {
    const Input in{x, half != 0};
    by_blocks(threads, rows, [&](int64_t r) {
        unit_row(row_of(in, r * width, width, scratch_of_thread(width)), nullptr, width, eps, scale, y + r * width);
    });
}

extern "C" void gnomon_unit_backward(const void* x, const float* d_y, int32_t half, int64_t rows, int64_t width, float eps, float scale,
                                     void* d_x, int32_t threads) {
    const Input in{x, half != 0};
    const Output out{d_x, half != 0};
    by_blocks(threads, rows, [&](int64_t r) {
        const int64_t at = r * width;
        float *room = scratch_of_thread(2 * width), *to = room_of(out, at, room + width);
        unit_row(row_of(in, at, width, room), d_y + at, width, eps, scale, to);
        put(out, at, width, to);
    });
}

extern "C" void gnomon_rms_forward(const void* x, const void* weight, const void* gate, int32_t half, int64_t rows, int64_t width,
                                   float eps, void* y, int32_t threads) {
    const Input in{x, bit(half, 0)}, gates{gate, bit(half, 2)};
    const Output out{y, bit(half, 3)};
    std::vector<float> w(width);
    Input{weight, bit(half, 1)}.row(0, width, w.data());
    by_blocks(threads, rows, [&](int64_t r) {
        const int64_t at = r * width;
        float *room = scratch_of_thread(3 * width), *to = room_of(out, at, room + 2 * width);
        const float* by = gate ? row_of(gates, at, width, room + width) : nullptr;
        rms_row(row_of(in, at, width, room), w.data(), by, width, eps, to, in.half && !gate);
        put(out, at, width, to);
    });
}

extern "C" void gnomon_rms_backward(const void* x, const void* weight, const void* gate, const void* d_y, int32_t half, int64_t rows,
                                    int64_t width, float eps, void* d_x, float* d_weight, void* d_gate, int32_t threads) {
    const Input in{x, bit(half, 0)}, gates{gate, bit(half, 2)}, incoming{d_y, bit(half, 3)};
    const Output out{d_x, bit(half, 0)}, out_gate{d_gate, bit(half, 2)};
    std::vector<float> w(width), partial(blocks_of(rows) * width, 0.0f);
    Input{weight, bit(half, 1)}.row(0, width, w.data());
    by_blocks(threads, rows, [&](int64_t r) {
        const int64_t at = r * width;
        float* room = scratch_of_thread(5 * width);
        float *to = room_of(out, at, room + 3 * width), *to_gate = gate ? room_of(out_gate, at, room + 4 * width) : nullptr;
        rms_row_back({row_of(in, at, width, room), w.data(), gate ? row_of(gates, at, width, room + width) : nullptr,
                      row_of(incoming, at, width, room + 2 * width), to, partial.data() + r / BLOCK * width, to_gate},
                     width, eps);
        put(out, at, width, to);
        if (gate) put(out_gate, at, width, to_gate);
    });
    std::fill(d_weight, d_weight + width, 0.0f);
    for (int64_t b = 0; b < blocks_of(rows); ++b)
        for (int64_t i = 0; i < width; ++i) d_weight[i] += partial[b * width + i];
}
