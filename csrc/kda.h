/* Kimi Delta Attention of an inference engine: everything between a KDA layer's input projections and its output projection, for the
 * rows of any number of sequences in one call. Plain fp32 arrays, owned by the caller.
 *
 * Legend: H heads, K channels of a head (keys and values are equally wide), C = 3 H K channels of q | k | v side by side.
 * What a row gives does not depend on the other sequences, on how its sequence is split into calls, or on the threads: to the last bit.
 */
#pragma once

#include <cstdint>

namespace gnomon {

struct Pool;

/* The weights that act on heads. conv_weight is [taps, C], its last row multiplies the current token; a_log [H]; dt_bias [H, K];
 * norm [K]. lower_bound (below zero) bounds the log decay of one token; 0 selects the softplus form, which has no bound. */
struct KDADecode {
    int64_t heads, width, taps;
    const float *conv_weight, *a_log, *dt_bias, *norm;
    float lower_bound, eps;
};

/* An array of rows and the distance between two of them in floats. */
struct KDAArray {
    const float* data;
    int64_t stride;
};

/* New tokens, all sequences end to end: sequence s is rows bounds[s] to bounds[s + 1] (exclusive); it may be empty.
 * Before any activation: projected [rows, C], decay [rows, H K] (dt_bias not yet added), beta [rows, H], gate [rows, H K]. */
struct KDARows {
    const int64_t* bounds;
    int64_t sequences;
    KDAArray projected, decay, beta, gate;
    float* out; /* [rows, H K] */
    int64_t out_stride;
};

/* States in pools: sequence s owns slot slots[s] of conv [slots, taps - 1, C] (its last projected inputs, oldest first) and of
 * matrix [slots, H, K, K]. A new sequence starts from zeros in both, written by the caller. */
struct KDASlots {
    float *conv, *matrix;
    const int64_t* slots;
};

/* Copies of states on the way: at [count, 3] holds (sequence, new tokens seen, slot in these pools), sorted by the first two. */
struct KDACopies {
    const int64_t* at;
    int64_t count;
    float *conv, *matrix;
};

/* Floats per row that kda_commit needs: q | k | v | decay | beta as they came in. */
inline int64_t kda_inputs_width(const KDADecode& layer) { return 4 * layer.heads * layer.width + layer.heads; }

/* Outputs of all rows. States are read, and advanced only with `commit`. inputs (or NULL) [rows, kda_inputs_width] is written. */
void kda_decode(Pool& pool, const KDADecode& layer, const KDARows& rows, const KDASlots& states, bool commit, const KDACopies& copies,
                float* inputs);

/* Advances each sequence's state by the first prefix[s] of the rows that kda_decode recorded in `inputs`. */
void kda_commit(Pool& pool, const KDADecode& layer, const float* inputs, const int64_t* bounds, int64_t sequences,
                const int64_t* prefix, const KDASlots& states);

}  // namespace gnomon
