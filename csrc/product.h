/* Dense fp32 products on one thread, for operators that multiply many small matrices and keep them in cache: C = A B or C = C + A B.
 *
 * B is packed once into panels of STRIPE columns, which the inner kernel walks with vectors; A is read where it lies, by rows or by
 * columns. Every element of C sums over k in ascending order in one accumulator, so it has the same bits for any size of the other
 * dimensions and any split of the rows or columns. Calls for parts of the sum (`add`) continue that order.
 */
#pragma once

#include <cstdint>

namespace gnomon {

const int64_t STRIPE = 64;

/* Floats that a packed [k, n] matrix takes. */
inline int64_t packed_size(int64_t k, int64_t n) { return (n + STRIPE - 1) / STRIPE * STRIPE * k; }

/* B [k, n] with rows `stride` apart; or B = M' with M [n, k]. Columns beyond n are zero. */
void pack(const float* b, int64_t stride, int64_t k, int64_t n, float* panels);
void pack_transposed(const float* m, int64_t stride, int64_t k, int64_t n, float* panels);

/* One product. A is [m, k] with rows `a_stride` apart or, `transposed`, stored as [k, m]; columns first..last of C [m, n], rows
 * `c_stride` apart, are written; `first` is a multiple of 16. With `b_stride` B is read where it lies, its rows that far apart, instead
 * of from panels; then its columns are a multiple of 16 too. */
struct Product {
    const float* a;
    int64_t a_stride;
    const float* panels;
    float* c;
    int64_t c_stride, m, k, first, last;
    bool transposed, add;
    int64_t b_stride = 0;
};
void multiply(const Product& product);

}  // namespace gnomon
