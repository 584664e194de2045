/* What a layer does to rows between its products: norms, the gates, a sum. Each row's result depends on that row alone. */
#pragma once

#include <cstdint>

#include "pool.h"

namespace gnomon {

/* x <- x / sqrt(mean x^2 + eps) * weight over the first `width` values of rows that are `stride` apart. */
void normalise(Pool& pool, float* x, const float* weight, int64_t rows, int64_t width, int64_t stride, float eps);

/* x <- x sigmoid(gate); both [rows, width]. */
void gate_rows(Pool& pool, float* x, const float* gate, int64_t rows, int64_t width);

/* gate <- situ(gate, up), both [rows, width]; caps of 0 are none. */
void situ_rows(Pool& pool, float* gate, const float* up, int64_t rows, int64_t width, float beta1, float beta2);

/* sum <- x, or sum + x with `add`; `count` values. */
void add_rows(Pool& pool, const float* x, int64_t count, float* sum, bool add);

/* Rows `ids` of a table [*, width] of fp32, or of bf16 where `half`, to fp32 rows y. */
void look_up(const void* table, bool half, const int64_t* ids, int64_t rows, int64_t width, float* y);

}  // namespace gnomon
