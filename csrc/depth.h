/* The depth read of an inference engine (report section 2.2): each sublayer mixes the banked sums and the live one by its own query, then
 * normalises for what follows. Rows of plain fp32, `width` apart; a row's result is its own to the last bit.
 *
 * Direct:     depth_read_norm, once per sublayer.
 * Two phases: depth_bank reads the bank once for all queries of a block, depth_merge_norm adds the live sum per sublayer. Queries are
 *             parameters, not functions of the input, so this is exact up to rounding.
 */
#pragma once

#include <cstdint>

#include "pool.h"

namespace gnomon {

/* One read: its query [width] (norm weight times pseudo-query, never rounded), and the weight [width] of the RMSNorm that follows (NULL: no
 * norm, the mix itself is the result). Both use eps. */
struct DepthRead {
    const float *query, *norm;
    int64_t width;
    float eps;
};

/* out [rows, width] = norm(sum_j p_j v_j), p = softmax_j <query, v_j> / rms(v_j), over `count` sources [rows, width]; with one source there
 * is nothing to mix. mixed (or NULL) [rows, width] receives the mix before the norm; it may not overlap out. */
void depth_read_norm(Pool&, const DepthRead&, const float* const* sources, int64_t count, int64_t rows, float* mixed, float* out);

/* What `queries` queries [queries, width] see of the bank: per query and row the largest score and the sum of exponentials below it, both
 * [queries, rows], and the weighted sum of the sources [queries, rows, width]. */
struct DepthPartials {
    float *largest, *denominator, *numerator;
};
void depth_bank(Pool&, const float* queries, int64_t count_queries, const float* const* bank, int64_t count, int64_t rows, int64_t width,
                float eps, const DepthPartials&);

/* out = norm of the read over bank and live [rows, width], from the partials of this read's query ([rows] and [rows, width]). */
void depth_merge_norm(Pool&, const DepthRead&, const DepthPartials&, const float* live, int64_t rows, float* mixed, float* out);

}  // namespace gnomon
