/* Small dense products in fp32 on register tiles of R rows of NV vectors, and transposition in registers. */
#pragma once

#include <cstdint>
#include <utility>

#include "lanes.h"

/* Rows that a tile of two vectors can hold next to its operands. */
template <int W>
constexpr int TILE_ROWS = W == 16 ? 8 : 4;

template <int W, int R, int NV>
struct Tile {
    vec<W> at[R][NV];

    INLINE void clear() {
        for (int r = 0; r < R; ++r)
            for (int j = 0; j < NV; ++j) at[r][j] = vec<W>{};
    }

    INLINE void load_rows(const float* x, int64_t row) {
        for (int r = 0; r < R; ++r)
            for (int j = 0; j < NV; ++j) at[r][j] = load<W>(x + r * row + j * W);
    }

    INLINE void store_rows(float* x, int64_t row) const {
        for (int r = 0; r < R; ++r)
            for (int j = 0; j < NV; ++j) store<W>(x + r * row + j * W, at[r][j]);
    }

    /* at[r] += sum over i < inner of x[r * x_row + i * x_step] * m[i * m_row ...]: x_step 1 reads rows of x, x_row 1 its columns. */
    INLINE void multiply(const float* x, int64_t x_row, int64_t x_step, const float* m, int64_t m_row, int64_t inner) {
        for (int64_t i = 0; i < inner; ++i) {
            vec<W> b[NV];
            for (int j = 0; j < NV; ++j) b[j] = load<W>(m + i * m_row + j * W);
            for (int r = 0; r < R; ++r) {
                const float factor = x[r * x_row + i * x_step];
                for (int j = 0; j < NV; ++j) at[r][j] += factor * b[j];
            }
        }
    }
};

template <int W, int S, int... L>
INLINE void exchange(vec<W>& a, vec<W>& b, std::integer_sequence<int, L...>) {
    const vec<W> low = __builtin_shufflevector(a, b, (L & S ? W + L - S : L)...);
    b = __builtin_shufflevector(a, b, (L & S ? W + L : L + S)...);
    a = low;
}

template <int W, int S>
INLINE void transpose_from(vec<W>* x) {
    for (int i = 0; i < W; ++i)
        if (!(i & S)) exchange<W, S>(x[i], x[i + S], std::make_integer_sequence<int, W>{});
    if constexpr (2 * S < W) transpose_from<W, 2 * S>(x);
}

/* Rows become columns: to[c * to_row + r] = from[r * from_row + c] for W rows and W columns. */
template <int W>
INLINE void transpose(const float* from, int64_t from_row, float* to, int64_t to_row) {
    vec<W> x[W];
    for (int i = 0; i < W; ++i) x[i] = load<W>(from + i * from_row);
    transpose_from<W, 1>(x);
    for (int i = 0; i < W; ++i) store<W>(to + i * to_row, x[i]);
}
