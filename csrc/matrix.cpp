/* Products with packed matrices: rounding the inputs, sharing the panels among threads, and the tile that does the arithmetic. */
#include "matrix.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "lanes.h"

namespace gnomon {

namespace {

/* One panel's 16 outputs for rows of x that are already rounded. */
struct Tile {
    const Matrix* w;
    int64_t panel;
    const float* x;
    int64_t rows, x_stride;
    float* y;
    int64_t y_stride;
    bool add;
};

template <int W>
INLINE vec<W> bits_to_float(typename Lanes<W>::ints bits) {
    vec<W> x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

template <int W>
INLINE typename Lanes<W>::ints load_bits(const void* p) {
    typename Lanes<W>::ints x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

/* sum + the pair's products, the odd one first. */
template <int W>
INLINE vec<W> add_pair(vec<W> sum, typename Lanes<W>::ints pair, const float* x) {
    sum += bits_to_float<W>(pair & static_cast<int32_t>(0xffff0000)) * x[1];
    sum += bits_to_float<W>(pair << 16) * x[0];
    return sum;
}

const float CODES[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

template <int W>
INLINE vec<W> values(typename Lanes<W>::ints codes) {
    vec<W> x;
    for (int l = 0; l < W; ++l) x[l] = CODES[codes[l] & 15];
    return x;
}

template <int W>
INLINE vec<W> scale(const uint8_t* bytes) {
    typename Lanes<W>::ints bits;
    for (int l = 0; l < W; ++l) bits[l] = bytes[l] == 255 ? 0x7fc00000 : bytes[l] ? bytes[l] << 23 : 0x00400000;
    return bits_to_float<W>(bits);
}

template <int W>
INLINE vec<W> dot_fp32(const Matrix& w, int64_t panel, int64_t lane, const float* x) {
    const float* data = static_cast<const float*>(w.data) + panel * w.in * PANEL + lane;
    vec<W> sum = {};
    for (int64_t i = 0; i < w.in; ++i) sum += load<W>(data + i * PANEL) * x[i];
    return sum;
}

template <int W>
INLINE vec<W> dot_bf16(const Matrix& w, int64_t panel, int64_t lane, const float* x) {
    const int64_t pairs = (w.in + 1) / 2;
    const int32_t* data = static_cast<const int32_t*>(w.data) + panel * pairs * PANEL + lane;
    vec<W> sum = {};
    for (int64_t i = 0; i < pairs; ++i) sum = add_pair<W>(sum, load_bits<W>(data + i * PANEL), x + 2 * i);
    return sum;
}

template <int W>
INLINE vec<W> dot_mxfp4(const Matrix& w, int64_t panel, int64_t lane, const float* x) {
    const int64_t blocks = w.in / BLOCK;
    const int32_t* data = static_cast<const int32_t*>(w.data) + panel * blocks * 4 * PANEL + lane;
    const uint8_t* scales = w.scales + panel * blocks * PANEL + lane;
    vec<W> total = {};
    for (int64_t block = 0; block < blocks; ++block) {
        vec<W> sum = {};
        for (int64_t word = 0; word < 4; ++word) {
            const auto codes = load_bits<W>(data + (block * 4 + word) * PANEL);
            const float* inputs = x + block * BLOCK + word * 8;
            for (int pair = 0; pair < 4; ++pair) {
                sum += values<W>(codes >> (16 + 4 * pair)) * inputs[2 * pair + 1];
                sum += values<W>(codes >> (4 * pair)) * inputs[2 * pair];
            }
        }
        total += scale<W>(scales + block * PANEL) * sum;
    }
    return total;
}

template <int W>
INLINE void tile_body(const Tile& t) {
    const int64_t first = t.panel * PANEL;
    for (int64_t row = 0; row < t.rows; ++row) {
        const float* x = t.x + row * t.x_stride;
        for (int64_t lane = 0; lane < PANEL && first + lane < t.w->out; lane += W) {
            float* y = t.y + row * t.y_stride + first + lane;
            const int64_t count = std::min<int64_t>(W, t.w->out - first - lane);
            vec<W> sum = t.w->format == F32 ? dot_fp32<W>(*t.w, t.panel, lane, x)
                         : t.w->format == BF16 ? dot_bf16<W>(*t.w, t.panel, lane, x) : dot_mxfp4<W>(*t.w, t.panel, lane, x);
            if (t.add) sum = load_some<W>(y, count) + sum;
            store_some<W>(y, count, sum);
        }
    }
}

DISPATCH(tile, (const Tile& t), (t))

float rounded(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) bits |= 0x00400000; /* NaN stays NaN */
    else bits += 0x7fff + (bits >> 16 & 1);
    bits &= 0xffff0000;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

/* Rows of inputs as the tile reads them: rounded for bf16 products, padded to an even length. */
std::vector<float> prepared(const float* x, int64_t rows, int64_t stride, int64_t in, bool round) {
    const int64_t width = in + in % 2;
    std::vector<float> result(rows * width, 0.0f);
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < in; ++i) result[row * width + i] = round ? rounded(x[row * stride + i]) : x[row * stride + i];
    return result;
}

int64_t panels(const Matrix& w) { return (w.out + PANEL - 1) / PANEL; }

}  // namespace

void multiply(Pool& pool, const Matrix& w, const float* x, int64_t rows, int64_t x_stride, float* y, int64_t y_stride, bool add) {
    const std::vector<float> inputs = prepared(x, rows, x_stride, w.in, w.format != F32);
    const int64_t width = w.in + w.in % 2;
    parallel(pool, panels(w), [&](int64_t panel, int) { tile({&w, panel, inputs.data(), rows, width, y, y_stride, add}); });
}

void multiply_many(Pool& pool, const Matrix* const* w, float* const* y, int64_t count, const float* x, int64_t rows, int64_t x_stride) {
    for (int64_t i = 0; i < count; ++i) multiply(pool, *w[i], x, rows, x_stride, y[i], w[i]->out);
}

void experts(Pool& pool, const Experts& e, const float* z, const int32_t* ids, const float* weights, int64_t rows, int64_t k, float* y) {
    if (rows == 0) return;
    const int64_t latent = e.gate[0].in, inner = e.gate[0].out;
    parallel(pool, rows, [&](int64_t row, int) {
        std::vector<float> gate(inner), up(inner), hidden(inner), out(latent);
        Pool& here = gnomon::pool(1);
        std::fill(y + row * latent, y + (row + 1) * latent, 0.0f);
        for (int64_t j = 0; j < k; ++j) {
            const int32_t id = ids[row * k + j];
            multiply(here, e.gate[id], z + row * latent, 1, latent, gate.data(), inner);
            multiply(here, e.up[id], z + row * latent, 1, latent, up.data(), inner);
            gnomon_situ_forward(gate.data(), up.data(), 1, inner, e.beta1, e.beta2, hidden.data(), 1);
            multiply(here, e.down[id], hidden.data(), 1, inner, out.data(), latent);
            for (int64_t i = 0; i < latent; ++i) y[row * latent + i] += weights[row * k + j] * out[i];
        }
    });
}

}  // namespace gnomon

extern "C" void gnomon_matrix_multiply(const gnomon_matrix* w, const float* x, int64_t rows, int64_t x_stride, float* y, int64_t y_stride,
                                       int32_t add, int32_t threads) {
    gnomon::multiply(gnomon::pool(threads), *w, x, rows, x_stride, y, y_stride, add != 0);
}

extern "C" void gnomon_experts_forward(const gnomon_experts* experts, const float* z, const int32_t* ids, const float* weights, int64_t rows,
                                       int64_t k, float* y, int32_t threads) {
    gnomon::experts(gnomon::pool(threads), *experts, z, ids, weights, rows, k, y);
}
