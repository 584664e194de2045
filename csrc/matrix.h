/* Products with packed weight matrices, for inference: the seam on which a layer is built (see gnomon.h for the C interface).
 *
 * A matrix W [out, in] stands in groups of 64 outputs (the last one narrower, in whole panels of 16), one after another in memory. In a
 * group of G outputs inputs follow one another and outputs lie along the lanes of vectors, so that a product reads one stream:
 *   F32    [in][G] floats
 *   BF16   [in / 2][G][2]: inputs 2i and 2i + 1 of each output; an odd `in` is padded with zero
 *   MXFP4  [in / 8][G] words of 8 codes: bits 4k of a word hold input 2k, bits 16 + 4k hold input 2k + 1; scales [in / 32][G] bytes
 * Outputs beyond `out` are zero weights. The layout is the same for every instruction set.
 *
 * Order of sums. An output adds its inputs in one chain, whatever the number of rows, threads or the company of a row: F32 from the first
 * input to the last; BF16 pair by pair, in a pair the odd input first (as the AVX512-BF16 instruction does); MXFP4 the same over the 32
 * inputs of a block in the codes' own values, then one multiply-add of the block's sum by its scale. Products of bf16 values are exact in
 * fp32. */
#pragma once

#include <cstdint>

#include "gnomon.h"
#include "pool.h"

namespace gnomon {

enum Format : int32_t { F32 = 0, BF16 = 1, MXFP4 = 2 };
typedef gnomon_matrix Matrix;   /* data, scales, out, in, format */
typedef gnomon_experts Experts; /* gate, up, down, count, beta1, beta2 */

const int64_t PANEL = 16; /* outputs of one panel */
const int64_t BLOCK = 32; /* inputs that share a scale */

/* Bytes of the packed weights and of the packed scales. */
int64_t data_bytes(const Matrix& w);
int64_t scale_bytes(const Matrix& w);

/* y[r][0..out) = W x[r], plus y when `add`. x and y are fp32 rows `x_stride` and `y_stride` apart. For BF16 and MXFP4 weights x is rounded
 * to bf16 once, to nearest even. */
void multiply(Pool& pool, const Matrix& w, const float* x, int64_t rows, int64_t x_stride, float* y, int64_t y_stride, bool add = false);

/* `count` matrices over the same rows in one parallel region; y[i] has rows of w[i]->out. All have one `in`. */
void multiply_many(Pool& pool, const Matrix* const* w, float* const* y, int64_t count, const float* x, int64_t rows, int64_t x_stride);

/* Routed experts: y[r] = sum_j weights[r][j] down_e(situ(gate_e z_r, up_e z_r)) with e = ids[r][j], summed in the order of j.
 * z, y [rows, latent]; ids, weights [rows, k]. The intermediate is rounded to bf16 as every input of a product is. With `mxfp8` both
 * inputs are rounded to MXFP8 first (blocks of 32, so both widths must be multiples of it). */
void experts(Pool& pool, const Experts& e, const float* z, const int32_t* ids, const float* weights, int64_t rows, int64_t k, float* y,
             bool mxfp8 = false);

}  // namespace gnomon
