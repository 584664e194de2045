/* Products of attention; attention_tile.h says what they compute and in which order. */
#include "attention_tile.h"

namespace gnomon::attention {
namespace {

template <int W>
INLINE vec<W> as_floats(words_of<W> x) {
    vec<W> y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}

template <int W, int F>
INLINE void fold(vec<W>& sum, word a, const words_of<W>& b) {
    if constexpr (F == SINGLE) {
        sum += as_float(a) * as_floats<W>(b);
    } else if constexpr (F == PAIRS) {
        sum += as_float(a & 0xffff0000u) * as_floats<W>(b & static_cast<int32_t>(0xffff0000u));
        sum += as_float(a << 16) * as_floats<W>(b << 16);
    } else {
#if defined(__x86_64__)
        const words_of<W> both = words_of<W>{} + static_cast<int32_t>(a);
        asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(both), "v"(b));
#endif
    }
}

/* The loops of a tile, written out: with constant indices the sums stay in registers. */
template <int W, int V, size_t... I>
INLINE void begin(vec<W>* sum, const float* c, int64_t c_stride, const float* keep, std::index_sequence<I...>) {
    if (keep) ((sum[I] = keep[I / V] * load<W>(c + I / V * c_stride + I % V * W)), ...);
    else ((sum[I] = vec<W>{}), ...);
}

template <int W, int V, size_t... I>
INLINE void end(const vec<W>* sum, float* c, int64_t c_stride, std::index_sequence<I...>) {
    (store<W>(c + I / V * c_stride + I % V * W, sum[I]), ...);
}

template <int W, size_t... I>
INLINE void fetch(words_of<W>* right, const word* b, int64_t panel_words, std::index_sequence<I...>) {
    (std::memcpy(&right[I], b + I * W / PANEL * panel_words * PANEL + I * W % PANEL, sizeof right[I]), ...);
}

template <int W, int F, int V, size_t... I>
INLINE void fold_all(vec<W>* sum, const word* a, int64_t a_stride, const words_of<W>* right, std::index_sequence<I...>) {
    (fold<W, F>(sum[I], a[I / V * a_stride], right[I % V]), ...);
}

template <int W, int F, int M, int P>
INLINE void tile(const Product& x, int64_t row, int64_t panel) {
    constexpr int V = P * PANEL / W;
    constexpr auto all = std::make_index_sequence<M * V>{};
    const word *a = x.a + row * x.a_stride, *b = x.b + panel * x.panel_words * PANEL;
    float* c = x.c + row * x.c_stride + panel * PANEL;
    vec<W> sum[M * V];
    begin<W, V>(sum, c, x.c_stride, x.keep ? x.keep + row : nullptr, all);
    for (int64_t i = 0; i < x.words; ++i) {
        words_of<W> right[V];
        fetch<W>(right, b + i * PANEL, x.panel_words, std::make_index_sequence<V>{});
        fold_all<W, F, V>(sum, a + i, x.a_stride, right, all);
    }
    end<W, V>(sum, c, x.c_stride, all);
}

/* Rows and panels of one tile: as many accumulators as the registers hold. */
template <int W>
constexpr int TILE_ROWS = W == 16 ? 6 : W == 8 ? 4 : 2;
template <int W>
constexpr int TILE_PANELS = W == 16 ? 4 : 1;

template <int W, int F, int P>
INLINE void strip(const Product& x, int64_t rows, int64_t panel) {
    constexpr int M = TILE_ROWS<W>;
    int64_t row = 0;
    for (; row + M <= rows; row += M) tile<W, F, M, P>(x, row, panel);
    for (; row + 2 <= rows; row += 2) tile<W, F, 2, P>(x, row, panel);
    for (; row < rows; ++row) tile<W, F, 1, P>(x, row, panel);
}

template <int W, int F>
INLINE void multiply_body(const Product& x, int64_t rows) {
    constexpr int P = TILE_PANELS<W>;
    int64_t panel = 0;
    for (; panel + P <= x.panels; panel += P) strip<W, F, P>(x, rows, panel);
    for (; panel < x.panels; ++panel) strip<W, F, 1>(x, rows, panel);
}

DISPATCH_OPERANDS(multiply, (const Product& x, int64_t rows), (x, rows))

}  // namespace

Multiply multiply_rows(int32_t format) { return multiply(format); }

}  // namespace gnomon::attention
