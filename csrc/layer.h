/* A whole model for inference: what a layer is made of, where states lie, which rows one call has. Plain structures that the caller
 * fills once (src/gnomon/model/inference_layout.py mirrors them field by field); nothing here owns memory.
 *
 * Legend: D hidden width, H heads, K channels of a KDA head, C latent and R shared-key width of MLA, L layers.
 * Activations are fp32 throughout; a product with BF16 or MXFP4 weights rounds its input rows to bf16 once, nothing else is rounded.
 */
#pragma once

#include <cstdint>

#include "attention.h"
#include "kda.h"
#include "matrix.h"
#include "pool.h"

namespace gnomon {

/* KDA: qkv is q | k | v stacked; gate reads gate_a's output where gate_a is present (low-rank form), else the layer's input. */
struct KDALayer {
    Matrix qkv, decay_a, decay_b, beta, gate_a, gate, out;
    const float *conv, *a_log, *dt_bias, *norm; /* [taps, 3 H K], [H], [H K], [K] */
};

/* MLA: query reads query_a's normalised output where query_a is present, else the layer's input; gate may be absent (out = 0). */
struct MLALayer {
    Matrix query_a, query, latent, gate, out;
    LatentWeights keys_values; /* kv_b */
    const float *query_norm, *latent_norm;
};

/* A feed-forward: `gate`, `up`, `down` are the dense one, or the shared experts (absent: out = 0). With routed experts: router [E, D]
 * fp32; to_latent and from_latent are absent where experts work at full width; norm may be NULL. */
struct FeedForward {
    Matrix gate, up, down, router, to_latent, from_latent;
    const float *bias, *norm;
    Experts routed; /* count = 0: dense */
};

enum Mixer : int32_t { KDA_MIXER = 0, MLA_MIXER = 1 };
enum Commits : int32_t { BEFORE_MIXER = 1, BEFORE_FEED_FORWARD = 2 };

/* One layer. commits: where the running sum is banked after it was read (Commits). place, routed: the layer's number among those of its
 * mixer, and among those with routed experts. Queries are norm weight times pseudo-query, NULL where nothing is mixed. */
struct Layer {
    int32_t mixer, commits, place, routed;
    const float *mixer_query, *feed_query, *mixer_norm, *feed_norm;
    KDALayer kda;
    MLALayer mla;
    FeedForward feed;
};

/* The model. embedding is a table of rows, F32 or BF16. sources is the most that a depth read mixes. */
struct Model {
    int64_t layers, hidden, vocabulary, sources;
    const Layer* layer;
    const void* embedding;
    const float *output_query, *norm;
    Matrix head;
    int32_t embedding_format;
    float eps, beta1, beta2; /* caps of SiTU, 0: none */
    int64_t kda_layers, kda_heads, kda_width, taps, mla_layers;
    LatentShape mla;
    int64_t experts_per_token, groups, kept_groups, renormalise, routed_layers;
    float routed_scale, lower_bound, latent_eps;
    int32_t mxfp8; /* whether the inputs of routed experts are rounded to MXFP8 */
};

/* Pools of states. matrices [slots, kda_layers, H, K, K]; conv [slots, kda_layers, taps - 1, 3 H K]; latents
 * [pages, mla_layers, page_tokens, C + R], F32 or BF16. */
struct Pools {
    float *matrices, *conv;
    void* latents;
    int32_t latent_format;
    int64_t page_tokens;
};

/* Rows of one call: sequence s has new tokens bounds[s] to bounds[s + 1] (exclusive, maybe none) after past[s] earlier ones, its state in
 * slots[s], its pages in pages[s, 0..pages_each). Rows come from `tokens` or, where that is NULL, from `embeddings` [rows, D].
 * copies [count, 3]: (sequence, new tokens seen, slot) where KDA states are copied on the way, sorted by the first two. Sequences from
 * `held` on keep their state; what `advance` needs of their rows is written to record [kda_layers, held rows, kda_inputs_width].
 * wanted: rows of the call, ascending, whose hidden vectors are returned. chosen [rows, routed_layers, experts_per_token] receives the
 * experts that each row goes to, unless it is NULL. */
struct Rows {
    int64_t sequences, held, pages_each, copied, wanted_count;
    const int64_t *tokens, *bounds, *past, *slots, *copies, *wanted;
    const float* embeddings;
    const int32_t* pages;
    float* record;
    int32_t* chosen;
};

/* What one pass over the layers takes of a call: a stretch of each sequence, `rows` in all. Sequence s is rows bounds[s] to bounds[s + 1]
 * of the pass (exclusive, maybe none) after past[s] tokens, and its first is row origin[s] of the call. slots and copies are counted in
 * units of one layer's state. */
struct Pass {
    int64_t sequences, held, rows, pages_each, copied;
    int64_t *bounds, *past, *slots, *copies, *origin;
    const int32_t* pages;
    float* record;
    int32_t* chosen; /* of the whole call */
    int64_t record_layer; /* floats between two layers of the record */
};

/* The depth stream of a pass: sources[0..banked) are finished, sources[banked] is the running sum where it is `open`. */
struct Stream {
    float** sources; /* [rows, D] each */
    const float** window; /* room for as many pointers */
    int64_t banked;
    bool open;
};

/* Hands out pieces of scratch memory; with a null base it only counts. */
struct Arena {
    char* base;
    int64_t used = 0;
    template <class T = float>
    T* take(int64_t count) {
        T* at = reinterpret_cast<T*>(base + used);
        used += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return at;
    }
};

/* One KDA layer as the recurrence takes it, and where its states lie. */
KDADecode kda_of(const Model& model, const Layer& layer);
KDASlots slots_of(const Model& model, const Pools& pools, int64_t place, const int64_t* slots);

/* Floats of one layer's convolution history, and of one row of the record in one layer. */
inline int64_t conv_floats(const Model& m) { return (m.taps - 1) * 3 * m.kda_heads * m.kda_width; }
inline int64_t record_floats(const Model& m) { return 4 * m.kda_heads * m.kda_width + m.kda_heads; }

/* Bytes of scratch memory that a pass over `rows` rows needs beside the stream. */
int64_t layer_scratch_bytes(const Model& model, int64_t rows);

/* One layer: depth read and norm, mixer, add; depth read and norm, feed-forward, add. States are read and advanced in the pools. */
void layer_forward(Pool& pool, const Model& model, const Layer& layer, const Pools& pools, const Pass& pass, Stream& stream, char* scratch);

/* x = norm(mix of the sources): what every sublayer and the head read. first and rows choose rows of the stream. */
void read_stream(Pool& pool, const Model& model, const float* query, const float* norm, const Stream& stream, int64_t first, int64_t rows,
                 float* x);

}  // namespace gnomon
