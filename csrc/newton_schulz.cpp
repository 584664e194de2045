/* Newton-Schulz orthogonalisation for batches of matrices (report section 2.5). What the function computes stands in training.h.
 *
 * One step is X <- P X with P = a + b G + c G^2 and G = X X', or X <- X P with G = X' X where X is tall. All P are polynomials of the first
 * G, so they commute, and for a while they can act on the small square alone: G <- P G P, Q <- P Q, and X <- Q X in the end. That saves the
 * products with X, which for the map of one head are nearly all there is. X is formed again after three steps, since a small singular
 * value squared is lost beside the largest in fp32. Every square here is symmetric: what lies below the diagonal is copied.
 *
 * A thread takes whole matrices; what does not divide by the threads is shared row by row. Either way every element has one order of sums.
 */
#include <algorithm>
#include <cmath>
#include <memory>

#include "gnomon.h"
#include "lanes.h"
#include "product.h"

namespace {

using namespace gnomon;

const int64_t BLOCK = 48;      /* rows of one task of a product: a multiple of the kernel's six and of product.h's sixteen */
const int64_t STEPS_APART = 3; /* steps on the square alone */
const double WIDE = 1.4;       /* length over width from which the square alone is cheaper */
const float TINY = 1e-7f;      /* keeps a zero matrix zero */

template <int W>
INLINE void squares_body(const float* x, int64_t count, double* total) {
    const int64_t PIECE = 1024;
    *total = 0.0;
    for (int64_t start = 0; start < count; start += PIECE) {
        vec<W> partial = {};
        for (int64_t i = start; i < std::min(start + PIECE, count); i += W) {
            const vec<W> v = load_some<W>(x + i, std::min<int64_t>(W, count - i));
            partial += v * v;
        }
        *total += sum<W>(partial);
    }
}

DISPATCH(squares, (const float* x, int64_t count, double* total), (x, count, total))

/* One thread's or one team's work on one matrix [rows, columns]; `n` is the smaller side. */
struct Matrix {
    int64_t rows, columns, n;
    bool tall;
    int32_t threads;
    std::unique_ptr<float[]> memory;
    float *x, *next, *gram, *square, *product, *q, *panels;

    Matrix(int64_t rows, int64_t columns, int32_t threads)
        : rows(rows), columns(columns), n(std::min(rows, columns)), tall(rows > columns), threads(threads) {
        const int64_t size = rows * columns, small = n * n;
        const int64_t packed = std::max({packed_size(rows, columns), packed_size(columns, rows), packed_size(n, n)});
        memory.reset(new float[2 * size + 4 * small + packed]);
        float* at = memory.get();
        for (float** part : {&x, &next}) *part = at, at += size;
        for (float** part : {&gram, &square, &product, &q}) *part = at, at += small;
        panels = at;
    }

    /* to = left right, rows by rows. */
    void full(const float* left, int64_t m, int64_t k, int64_t width, float* to) const {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
        for (int64_t i = 0; i < m; i += BLOCK)
            multiply({left + i * k, k, panels, to + i * width, width, std::min(BLOCK, m - i), k, 0, width, false, false});
    }

    /* A symmetric product [n, n] of `left` [n, k], or stored as [k, n], with what is in the panels. */
    void symmetric(const float* left, int64_t k, bool transposed, float* to) const {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
        for (int64_t i = 0; i < n; i += BLOCK) {
            const int64_t stride = transposed ? n : k, count = std::min(BLOCK, n - i);
            multiply({left + (transposed ? i : i * stride), stride, panels, to + i * n, n, count, k, i, n, transposed, false});
            for (int64_t column = i + BLOCK; column < n; ++column)
                for (int64_t row = i; row < i + count; ++row) to[column * n + row] = to[row * n + column];
        }
    }

    void start(const float* gradient) {
        const int64_t size = rows * columns;
        double total = 0.0;
        squares(gradient, size, &total);
        const float factor = static_cast<float>(1.0 / (std::sqrt(total) + TINY));
        for (int64_t i = 0; i < size; ++i) x[i] = gradient[i] * factor;
    }

    /* `steps` steps on the square, then X. */
    void advance(int64_t steps, float a, float b, float c) {
        const int64_t k = std::max(rows, columns), small = n * n;
        if (tall) pack(x, columns, rows, columns, panels);
        else pack_transposed(x, columns, columns, rows, panels);
        symmetric(x, k, tall, gram);
        for (int64_t step = 0; step < steps; ++step) {
            pack(gram, n, n, n, panels);
            symmetric(gram, n, false, square);
            for (int64_t i = 0; i < small; ++i) square[i] = b * gram[i] + c * square[i];
            for (int64_t i = 0; i < n; ++i) square[i * n + i] += a; /* P */
            if (step + 1 < steps) {
                symmetric(square, n, false, product);
                pack(product, n, n, n, panels);
                symmetric(square, n, false, gram);
            }
            if (step == 0) {
                std::swap(q, square);
            } else {
                pack(q, n, n, n, panels);
                symmetric(square, n, false, product);
                std::swap(q, product);
            }
        }
        if (tall) pack(q, n, n, n, panels), full(x, rows, columns, columns, next);
        else pack(x, columns, rows, columns, panels), full(q, rows, rows, columns, next);
        std::swap(x, next);
    }

    void run(const float* gradient, int64_t steps, const float* coefficients, float* out) {
        start(gradient);
        const int64_t apart = std::max(rows, columns) >= WIDE * n ? STEPS_APART : 1;
        for (int64_t left = steps; left > 0; left -= apart)
            advance(std::min(left, apart), coefficients[0], coefficients[1], coefficients[2]);
        std::copy_n(x, rows * columns, out);
    }
};

}  // namespace

extern "C" void gnomon_newton_schulz(const float* gradient, int64_t count, int64_t rows, int64_t columns, int64_t steps,
                                     const float* coefficients, float* out, int32_t threads) {
    const int64_t size = rows * columns, whole = threads > 1 ? count / threads * threads : count;
#pragma omp parallel num_threads(threads) if (whole > 0)
    if (whole > 0) {
        Matrix own(rows, columns, 1);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < whole; ++i) own.run(gradient + i * size, steps, coefficients, out + i * size);
    }
    if (whole == count) return;
    Matrix shared(rows, columns, threads);
    for (int64_t i = whole; i < count; ++i) shared.run(gradient + i * size, steps, coefficients, out + i * size);
}
